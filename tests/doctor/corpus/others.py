"""Towers of padded batches, of text and of audio, remote code, and the sites that reading their source shows."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.generic import build
from tests.doctor.corpus.shared import (
    CU_SEQLENS,
    FRAMES,
    INTERPOLATION,
    MASK_OR_NONE,
    PADDING_MASK,
    POSITION_IDS,
    attention,
)
from tests.doctor.corpus.sites import Site, sites
from tests.doctor.corpus.vision import IMAGES, Made, Tower
from tests.support import minicpm
from tests.support.towers import TINY, TINY_GLM, tower_classes

LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = LAYERS | {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PATCHES = LAYERS | {"image_size": 32, "patch_size": 8}
LENGTHS = [[40, 25, 8], [40, 40, 40], [31, 40, 2]]
CLIPS = [[100, 60], [80, 80], [120, 20, 20], [33, 127]]
"""Texts of a batch of three of 40 tokens, and clips of 160 frames."""

MINICPM = "tests.support.minicpm"


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(
    name: str, config: str, settings: dict[str, Any], calls: Callable[[], list[dict[str, Any]]], **more: Any
) -> Callable[[], Made]:
    """Return what makes a model of transformers of this configuration, and its calls."""

    def make() -> Made:
        torch.manual_seed(0)
        configuration = getattr(transformers, config)(**(settings | more))
        home = importlib.import_module(type(configuration).__module__.replace("configuration_", "modeling_"))
        return getattr(home, name)(configuration).eval(), calls()

    return make


def texts() -> list[dict[str, Any]]:
    tokens = torch.randint(3, 100, (3, 40), generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": tokens, "attention_mask": (torch.arange(40) < torch.tensor(own)[:, None]).long()}
        for own in LENGTHS
    ]


def sounds() -> list[dict[str, Any]]:
    marks = [(torch.arange(400) < 10 * torch.tensor(own)[:, None]).long() for own in LENGTHS]
    return [{"input_values": rows(3, 400), "attention_mask": mark} for mark in marks]


def patches_of_batches() -> list[dict[str, Any]]:
    shapes = torch.tensor([[[4, 6], [3, 4]], [[5, 5], [2, 7]], [[5, 5], [5, 5]]])
    return [
        {
            "pixel_values": rows(2, 25, 48),
            "pixel_attention_mask": (torch.arange(25) < own.prod(-1)[:, None]).long(),
            "spatial_shapes": own,
        }
        for own in shapes
    ]


def images_with_masks() -> list[dict[str, Any]]:
    """Images of up to 4 x 4 patches, one call without padding."""
    shapes = ([[4, 4], [3, 2]], [[4, 4], [4, 4]], [[2, 4], [4, 3]])
    at = torch.arange(4)
    masks = [torch.stack([(at[:, None] < height) & (at[None] < width) for height, width in own]) for own in shapes]
    return [{"pixel_values": rows(2, 3, 32, 32), "patch_attention_mask": mask} for mask in masks]


def images_of_sizes() -> list[dict[str, Any]]:
    """Pixtral's images, padded to one size, of 44 patches in all."""
    sizes = ([[32, 32], [32, 32], [32, 24]], [[32, 32], [24, 32], [32, 32]], [[32, 24], [32, 32], [32, 32]])
    return [{"pixel_values": rows(3, 3, 32, 32), "image_sizes": torch.tensor(own)} for own in sizes]


def packed_images() -> list[dict[str, Any]]:
    sizes = ([[4, 6], [2, 4]], [[4, 4], [4, 4]], [[4, 8]], [[2, 4], [6, 4]], [[2, 4], [2, 4], [4, 4]])
    return [{"pixel_values": rows(32, 192), "image_grid_hw": torch.tensor(own)} for own in sizes]


def plain_images() -> list[dict[str, Any]]:
    return [{"pixel_values": rows(2, 3, 32, 32, seed=seed)} for seed in range(3)]


def clips(name: str) -> Callable[[], Made]:
    return lambda: (
        build(name),
        [{"input_features": rows(16, 160), "feature_lens": torch.tensor(layout)} for layout in CLIPS],
    )


def spectrograms(mask: bool) -> Callable[[], list[dict[str, Any]]]:
    """Return calls of mel spectrograms of one length; attention masks of two dimensions less, where there are any."""
    lengths = ([40, 23], [31, 40], [17, 25])

    def calls() -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [{"input_features": rows(2, 16, 80)} for _ in lengths]
        if mask:
            for call, own in zip(made, lengths, strict=True):
                hidden = torch.arange(40) >= torch.tensor(own)[:, None]
                call["attention_mask"] = torch.zeros(2, 1, 40, 40).masked_fill(hidden[:, None, None], -1e9)
        return made

    return calls


def asr_clips() -> list[dict[str, Any]]:
    marks = [(torch.arange(400) < torch.tensor(own)[:, None]).long() for own in ([400, 60], [90, 80], [290, 170])]
    return [{"input_features": rows(2, 16, 400), "input_features_mask": mark} for mark in marks]


def family(name: str, settings: dict[str, Any], layouts: list[list[list[int]]], row: int) -> Callable[[], Made]:
    def make() -> Made:
        config, tower = tower_classes(name)
        torch.manual_seed(0)
        calls = [{"hidden_states": rows(96, row), "grid_thw": torch.tensor(layout)} for layout in layouts]
        return tower._from_config(config(**settings)).eval(), calls

    return make


def ernie_resampler() -> Made:
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as ernie

    config = transformers.Ernie4_5_VLMoeConfig(
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
        text_config={"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 16},
    )
    torch.manual_seed(0)
    layouts = ([[2, 4, 4], [1, 8, 8]], [[1, 4, 4], [1, 8, 10]], [[4, 4, 4], [2, 4, 4]])
    calls = [{"hidden_states": rows(96, 16), "grid_thw": torch.tensor(layout)} for layout in layouts]
    return ernie.Ernie4_5_VLMoeVariableResolutionResamplerModel(config).eval(), calls


def minicpm_vpm() -> Made:
    """Slices padded to 24 patches; the call with masks and sizes, as MiniCPM-V 2.6 makes it."""
    torch.manual_seed(0)
    sizes = ([[4, 6], [3, 4]], [[5, 4], [2, 12]], [[4, 4], [6, 4]])
    calls = []
    for own in sizes:
        lengths = torch.tensor(own).prod(-1)
        mask = (torch.arange(24) < lengths[:, None])[:, None]
        calls.append({"pixel_values": rows(2, 3, 4, 96), "patch_attention_mask": mask, "tgt_sizes": torch.tensor(own)})
    return minicpm.VisionTransformer().eval(), calls


def minicpm_resampler() -> Made:
    torch.manual_seed(0)
    sizes = ([[4, 6], [3, 4]], [[6, 4], [2, 12]], [[4, 4], [3, 8]])
    return minicpm.Resampler().eval(), [{"x": rows(2, 24, 48), "tgt_sizes": torch.tensor(own)} for own in sizes]


CHUNKS = (
    *sites("chunk_and_pad_features", "chunk_lengths = torch.full((chunk_num.sum(),)", "chunk_lengths.tolist()"),
    *sites("get_valid_indices", ".max().item()", "mask = torch.arange(", "mask.flatten().nonzero()"),
)
CHUNKS_PADDED = sites("chunk_and_pad_features", "nn.utils.rnn.pad_sequence(")
"""What is padded are the chunks that the list of their lengths made."""

AUDIO_WINDOWS = (
    *sites(
        "get_audio_cu_seqlens",
        "max_len_after_cnn = feature_lens_after_cnn.max().item()",
        "cu_chunk_lens += [window_aftercnn] * (cnn_len // window_aftercnn)",
        "remainder = cnn_len % window_aftercnn",
        "if remainder != 0:",
        "return torch.tensor(cu_chunk_lens, device=feature_lens.device)",
    ),
)
WINDOWS_LOOP = sites("get_audio_cu_seqlens", "for cnn_len in aftercnn_lens:")
"""As many turns as the tensor has entries, which is a size; what it runs is listed."""

NONE: tuple[Site, ...] = ()

MASKED = (PADDING_MASK, MASK_OR_NONE)


def masks_clips(model: str) -> tuple[Sequence[Site], Sequence[Site]]:
    """Return the sites of a model of speech, which puts a number at indices of its mask: a copy to the device."""
    function = f"{model}PreTrainedModel._get_feature_vector_attention_mask"
    return (*PADDING_MASK, *sites(function, "attention_mask[(torch.arange(")), MASK_OR_NONE


TOWERS: dict[str, Tower] = {
    "BERT": Tower(model("BertModel", "BertConfig", WORDS, texts), *MASKED),
    "CLIP": Tower(model("CLIPVisionModel", "CLIPVisionConfig", PATCHES, plain_images), NONE),
    "DINOv3": Tower(model("DINOv3ViTModel", "DINOv3ViTConfig", PATCHES, plain_images), NONE),
    "Ernie 4.5 VL resampler": Tower(
        ernie_resampler,
        sites(
            "Ernie4_5_VLMoeVariableResolutionResamplerModel._temporal_slicing",
            "batch_offsets[1:] = tokens_per_img_or_vid.cumsum(dim=0)[:-1]",
            "first_offset_range = range(0, temporal_size, 2)",
            "second_offset_range = range(1 if temporal_size > 1 else 0, temporal_size, 2)",
            "for temporal_offset_even, temporal_offset_odd in zip(",
            "first_slice_offsets.append(",
            "second_slice_offsets.append(",
            "first_slice_offsets = torch.cat(first_slice_offsets, dim=-1).to(",
            "second_slice_offsets = torch.cat(second_slice_offsets, dim=-1).to(",
        ),
        sites(
            "Ernie4_5_VLMoeVariableResolutionResamplerModel._temporal_slicing",
            "for temporal_size, spatial_size, batch_offset in zip(",
        ),
    ),
    "EuroBERT": Tower(model("EuroBertModel", "EuroBertConfig", WORDS, texts), *MASKED),
    "GLM-4.1V MoE": Tower(
        family("glm4v_moe", TINY_GLM, IMAGES, 96), POSITION_IDS + CU_SEQLENS + attention("Glm4vMoeVisionAttention")
    ),
    "HuBERT": Tower(
        model("HubertModel", "HubertConfig", LAYERS | {"conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [2, 2],
              "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}, sounds),
        *masks_clips("Hubert"),
    ),
    "Idefics2": Tower(model("Idefics2VisionTransformer", "Idefics2VisionConfig", PATCHES, images_with_masks), *MASKED),
    "Idefics3": Tower(model("Idefics3VisionTransformer", "Idefics3VisionConfig", PATCHES, images_with_masks), *MASKED),
    "MiniCPM-V 2.6": Tower(
        minicpm_vpm,
        (
            *sites(
                "Embeddings.position_ids",
                "torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / size), boundaries, right=True)",
                "position_ids[index][mask.view(-1)] = (h[:, None] * side + w).flatten()",
            ),
            *sites("Embeddings.forward", "tgt_sizes).to(x.device))"),
            *sites("VisionTransformer.forward", "torch.zeros(hidden.shape, dtype=x.dtype).masked_fill("),
        ),
        sites("VisionTransformer.forward", "attention_mask = attention_mask.to(x.device)"),
    ),
    "MiniCPM-V 2.6 resampler": Tower(
        minicpm_resampler,
        sites(
            "Resampler._keys",
            "if int(max(tgt_sizes.flatten())) > len(self.pos_embed):",
            "lengths = (tgt_sizes[:, 0] * tgt_sizes[:, 1]).tolist()",
            "padding = (torch.arange(max(lengths))",
            "positions = [self.pos_embed[:h, :w]",
        ),
        sites("Resampler._keys", "return v, v + nn.utils.rnn.pad_sequence(positions), padding"),
    ),
    "ModernBERT": Tower(
        model("ModernBertModel", "ModernBertConfig", WORDS | {
            "local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
        }, texts),
        *MASKED,
    ),
    "Phi-4 vision": Tower(
        model("Phi4MultimodalVisionModel", "Phi4MultimodalVisionConfig", PATCHES | {"crop_size": 32}, images_with_masks),
        *MASKED,
    ),
    "Pixtral": Tower(
        model("PixtralVisionModel", "PixtralVisionConfig", PATCHES, images_of_sizes),
        (
            *sites("PixtralVisionModel.forward", "embed[..., : (size[0] // self.patch_size)"),
            *sites("generate_block_attention_mask", "causal_mask[start:end, start:end] = 0"),
        ),
        sites("PixtralVisionModel.forward", "hpos_ids, wpos_ids = torch.meshgrid("),
    ),
    "Qwen2-Audio": Tower(
        model("Qwen2AudioEncoder", "Qwen2AudioEncoderConfig", {
            "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32,
            "max_source_positions": 40,
        }, spectrograms(mask=True)),
        NONE,
    ),
    "Qwen2.5-Omni audio": Tower(
        clips("Qwen2_5OmniAudioEncoder"),
        (
            *CHUNKS,
            *sites(
                "get_pool_indices",
                "pair_offsets = torch.repeat_interleave(",
                "local_indices = torch.arange(num_pooled.sum()",
                "local_indices -= torch.repeat_interleave(",
            ),
            *attention("Qwen2_5OmniAudioAttention"),
        ),
        CHUNKS_PADDED,
    ),
    "Qwen3-ASR": Tower(
        model("Qwen3ASREncoder", "Qwen3ASREncoderConfig", {
            "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32,
            "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 8, "output_dim": 24,
        }, asr_clips),
        (
            *AUDIO_WINDOWS,
            *sites("Qwen3ASREncoder.forward", "valid_indices = valid_mask.flatten().nonzero()"),
            *attention("Qwen3ASRAudioAttention"),
        ),
        WINDOWS_LOOP,
    ),
    "Qwen3-Omni audio": Tower(
        clips("Qwen3OmniMoeAudioEncoder"),
        (*CHUNKS, *AUDIO_WINDOWS, *attention("Qwen3OmniMoeAudioAttention")),
        CHUNKS_PADDED + WINDOWS_LOOP,
    ),
    "Qwen3-VL MoE": Tower(
        family("qwen3_vl_moe", TINY, IMAGES, 96),
        INTERPOLATION + POSITION_IDS + CU_SEQLENS + attention("Qwen3VLMoeVisionAttention"),
    ),
    "Qwen3.5 MoE": Tower(
        family("qwen3_5_moe", {k: v for k, v in TINY.items() if k != "deepstack_visual_indexes"},
               [*IMAGES, [[2, 4, 4], [1, 8, 8]]], 96),
        INTERPOLATION + POSITION_IDS + FRAMES + CU_SEQLENS + attention("Qwen3_5MoeVisionAttention"),
    ),
    "RADIO": Tower(
        model("RadioModel", "RadioConfig", LAYERS | {"patch_size": 8, "image_size": 32, "max_img_size": 64}, packed_images),
        (
            *sites(
                "RadioPatchEmbeddings._embed_packed_patches", "in zip(image_grid_hw.tolist(), patches.split("
            ),
            *sites(
                "RadioPatchEmbeddings._interpolate_position_embedding",
                "pos = F.interpolate(pos.float(), size=(max_dim, max_dim)",
            ),
            *sites(
                "RadioPatchEmbeddings._interpolate_position_embedding",
                "if input_dims[0] < pos.shape[-2]:",
                "if input_dims[1] < pos.shape[-1]:",
                with_body=True,
            ),
            *sites(
                "RadioModel._forward_packed",
                "starts.repeat_interleave(sequence_lengths)",
                "features = last_hidden_state[positions_in_image >= num_prefix_tokens]",
            ),
            *sites("RadioAttention.forward", "if cu_seqlens is None:"),
            *attention("RadioAttention", "outputs = ["),
        ),
        (
            *sites("RadioModel._forward_packed", "cu_seqlens=cu_seqlens if len(sequence_lengths) > 1 else None"),
            *sites("RadioAttention.forward", "if cu_seqlens is None:", with_body=True),
        ),
    ),
    "RoBERTa": Tower(model("RobertaModel", "RobertaConfig", WORDS, texts), *MASKED),
    "SigLIP": Tower(model("SiglipVisionModel", "SiglipVisionConfig", PATCHES, plain_images), NONE),
    "SigLIP 2": Tower(
        model("Siglip2VisionModel", "Siglip2VisionConfig", LAYERS | {"num_patches": 25, "patch_size": 4}, patches_of_batches),
        (
            *sites(
                "Siglip2VisionEmbeddings.resize_positional_embeddings",
                "height, width = spatial_shapes[i].tolist()",
                "resized_embeddings = F.interpolate(",
                "resulted_positional_embeddings[i, height * width :] = resized_embeddings[0]",
            ),
            *PADDING_MASK,
        ),
        (
            *sites(
                "Siglip2VisionEmbeddings.resize_positional_embeddings",
                "resized_embeddings = resized_embeddings.reshape(",
                "resulted_positional_embeddings[i, : height * width] = resized_embeddings",
            ),
            *sites("Siglip2MultiheadAttentionPoolingHead.forward", "if attention_mask is not None:\n            target_len",
                   with_body=True),
            *sites("Siglip2MultiheadAttentionPoolingHead.forward", "hidden_state = self.attention(probe"),
            *MASK_OR_NONE,
        ),
    ),
    "SmolVLM": Tower(model("SmolVLMVisionTransformer", "SmolVLMVisionConfig", PATCHES, images_with_masks), *MASKED),
    "T5": Tower(
        model("T5EncoderModel", "T5Config", {
            "vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        }, texts),
        *MASKED,
    ),
    "ViT": Tower(model("ViTModel", "ViTConfig", PATCHES, plain_images), NONE),
    "Wav2Vec2": Tower(
        model("Wav2Vec2Model", "Wav2Vec2Config", LAYERS | {"conv_dim": [8, 8], "conv_kernel": [4, 3],
              "conv_stride": [2, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
              "num_conv_pos_embedding_groups": 2}, sounds),
        *masks_clips("Wav2Vec2"),
    ),
    "Whisper": Tower(
        model("WhisperEncoder", "WhisperConfig", {
            "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32,
            "max_source_positions": 40,
        }, spectrograms(mask=False)),
        NONE,
    ),
}  # fmt: skip
