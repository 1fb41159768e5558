"""Towers listed after the doctor was written, before it ran on them, and the sites that reading their source shows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.doctor.corpus.others import LAYERS, LENGTHS, MASKED, NONE, PATCHES, WORDS, model, rows, texts
from tests.doctor.corpus.shared import MASK_OR_NONE, NEAREST, PADDING_MASK, VISION, WINDOW_INDEX, attention
from tests.doctor.corpus.sites import sites
from tests.doctor.corpus.vision import IMAGES, QWEN3, VIDEOS, Made, Tower

SIZES = [[[8, 8], [4, 8]], [[4, 8], [8, 8]], [[4, 4], [4, 4], [8, 8]], [[12, 8]]]
"""Heights and widths of images of 96 patches, which can be merged twice."""


def on_grids(*shape: int, name: str, layouts: list[list[list[int]]], columns: int = 3) -> Callable[[], list[dict]]:
    """Return calls of as many rows, and a grid of these columns."""
    return lambda: [{"pixel_values": rows(*shape), name: torch.tensor(layout)[:, 3 - columns :]} for layout in layouts]


def positions(height: int, width: int) -> Tensor:
    """Return `(x, y)` of patches, padded to 16."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([x.flatten(), y.flatten()], dim=-1)
    return nn.functional.pad(places, (0, 0, 0, 16 - len(places)), value=-1)


def padded_patches() -> list[dict[str, Any]]:
    sizes = ([(4, 4), (2, 4)], [(4, 2), (4, 4)], [(4, 4), (4, 4)])
    return [
        {
            "pixel_values": rows(2, 16, 48).sigmoid(),
            "pixel_position_ids": torch.stack([positions(*size) for size in own]),
        }
        for own in sizes
    ]


def spectrograms(length: int) -> list[dict[str, Any]]:
    """Return mel spectrograms of a batch of three, one call without padding."""
    marks = [torch.arange(length) < length // 40 * torch.tensor(own)[:, None] for own in LENGTHS]
    return [{"input_features": rows(3, length, 16), "attention_mask": mark.long()} for mark in marks]


def waveforms() -> list[dict[str, Any]]:
    marks = [(torch.arange(4000) < 100 * torch.tensor(own)[:, None]).long() for own in LENGTHS]
    return [{"input_values": rows(3, 4000), "attention_mask": mark} for mark in marks]


def flattened_patches() -> list[dict[str, Any]]:
    calls = []
    for own in LENGTHS:
        mask = torch.arange(40) < torch.tensor(own)[:, None]
        places = torch.arange(40).expand(3, 40)[..., None]
        calls.append({
            "flattened_patches": torch.cat([places // 8, places % 8, rows(3, 40, 48)], dim=-1),
            "attention_mask": mask.float(),
        })  # fmt: skip
    return calls


def sentences() -> list[dict[str, Any]]:
    """Return texts, and their lengths in place of a mask."""
    return [{"input_ids": call["input_ids"], "lengths": call["attention_mask"].sum(1)} for call in texts()]


def projector(lists: bool) -> Callable[[], Made]:
    """Return what makes the projector of Mistral 3, with sizes in pixels as a tensor or a list."""

    def make() -> Made:
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

        config = SimpleNamespace(
            vision_config=SimpleNamespace(hidden_size=16, patch_size=4),
            text_config=SimpleNamespace(hidden_size=24, rms_norm_eps=1e-5),
            spatial_merge_size=2, vision_feature_layer=-1, multimodal_projector_bias=False, projector_hidden_act="gelu",
        )  # fmt: skip
        torch.manual_seed(0)
        sizes = [torch.tensor(layout) * 4 for layout in SIZES]
        calls = [
            {"image_features": rows(96, 16), "image_sizes": [*map(tuple, own.tolist())] if lists else own}
            for own in sizes
        ]
        return Mistral3MultiModalProjector(config).eval(), calls

    return make


def merger() -> Made:
    from transformers.models.minicpm_ocr.modeling_minicpm_ocr import MiniCPMOcrMerger

    config = SimpleNamespace(
        merge_kernel_size=(2, 2), merger_times=2, vision_config=SimpleNamespace(hidden_size=16),
        text_config=SimpleNamespace(hidden_size=24),
    )  # fmt: skip
    torch.manual_seed(0)
    calls = [{"hidden_states": rows(1, 96, 16), "target_sizes": torch.tensor(layout)} for layout in SIZES]
    return MiniCPMOcrMerger(config).eval(), calls


def patch_embedder() -> Made:
    from transformers.models.pe_video.modeling_pe_video import PeVideoEncoderPatchEmbedder

    torch.manual_seed(0)
    masks = [torch.arange(40) < torch.tensor(own)[:, None] for own in LENGTHS]
    calls = [{"inputs_embeds": rows(3, 40, 16), "padding_mask": mask} for mask in masks]
    return PeVideoEncoderPatchEmbedder(SimpleNamespace(hidden_size=16)).eval(), calls


class Tokens(nn.Module):
    """The tokens that a quantizer of Emu3 gives images."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Any:
        return self.quantizer.encode(pixel_values, image_sizes).image_tokens


def image_tokens() -> Made:
    make = model("Emu3VQVAE", "Emu3VQVAEConfig", {
        "codebook_size": 32, "base_channels": 32, "channel_multiplier": (1, 2), "num_res_blocks": 1,
        "attn_resolutions": (1,), "hidden_size": 64, "temporal_downsample_factor": 2,
    }, list)  # fmt: skip
    quantizer, _ = make()
    sizes = ([[16, 16], [16, 8]], [[8, 16], [16, 16]], [[16, 16], [16, 16]])
    calls = [{"pixel_values": rows(2, 3, 16, 16), "image_sizes": torch.tensor(own)} for own in sizes]
    return Tokens(quantizer).eval(), calls


def images_of_one_height() -> list[dict[str, Any]]:
    """Return one call: three images alike, their sizes in a list."""
    return [{"pixel_values": rows(3, 3, 32, 32), "image_sizes": [(32, 32)] * 3}]


PIXTRAL = (
    *sites("PixtralVisionModel.forward", "embed[..., : (size[0] // self.patch_size)"),
    *sites("generate_block_attention_mask", "causal_mask[start:end, start:end] = 0"),
)

PIXEL_SHUFFLE = (
    *sites(
        "get_vision_pixel_shuffle_index",
        "for frames, height, width in grid_thw.tolist():",
        "permutation = torch.arange(height * width",
        "permutation = permutation.view(",
        "indices.append(permutation + offset)",
    ),
    *sites("get_vision_pixel_shuffle_index", "if frames > 1:", with_body=True),
)

MERGED = (
    *sites(
        "Mistral3PatchMerger.forward",
        "in enumerate(image_features.split(tokens_per_image)):",
        "image_grid = image_tokens.view(h, w, d)",
    ),
)
MERGED_LOOPS = sites("Mistral3PatchMerger.forward", "image_sizes = [", "tokens_per_image = [")

TOWERS: dict[str, Tower] = {
    "DeBERTa-v2": Tower(
        model("DebertaV2Model", "DebertaV2Config", WORDS | {
            "relative_attention": True, "position_buckets": 16, "pos_att_type": "c2p|p2c", "position_biased_input": False,
            "max_position_embeddings": 64,
        }, texts),
        sites("make_log_bucket_position", "abs_pos = torch.where("),  # `type_as` moves a tensor of the host
    ),
    "Emu3 tokens": Tower(
        image_tokens,
        sites(
            "Emu3VQVAE.encode", "single_image[: int(size[0] /", file="transformers.models.emu3.modeling_emu3"
        ),
    ),
    "Gemma 4": Tower(
        model("Gemma4VisionModel", "Gemma4VisionConfig", LAYERS | {
            "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
        }, padded_patches),
        (*PADDING_MASK, *sites("Gemma4VisionModel.forward", "hidden_states = hidden_states[pooler_mask]")),
        MASK_OR_NONE,
    ),
    "Inkling": Tower(
        model("InklingVisionModel", "InklingVisionConfig", {
            "text_hidden_size": 32, "patch_size": 8, "num_hidden_layers": 4, "hidden_size": 32,
        }, lambda: [{"pixel_values": rows(6, 2, 8, 8, 3, seed=seed)} for seed in range(3)]),
        NONE,
    ),
    "LASR": Tower(
        model("LasrEncoder", "LasrEncoderConfig", LAYERS | {
            "num_mel_bins": 16, "subsampling_conv_channels": 16, "conv_kernel_size": 5,
        }, lambda: spectrograms(160)),
        PADDING_MASK,
        (
            *MASK_OR_NONE,
            *sites("LasrEncoderConvolutionModule.forward", "if attention_mask is not None:", with_body=True),
        ),
    ),
    "MiniCPM-OCR": Tower(
        model("MiniCPMOcrVisionModel", "MiniCPMOcrVisionConfig", LAYERS | {
            "image_size": 32, "patch_size": 4, "insert_layer_id": 0,
        }, on_grids(1, 3, 4, 384, name="target_sizes", layouts=IMAGES, columns=2)),
        (
            *NEAREST, *WINDOW_INDEX,
            *sites(
                "MiniCPMOcrViTWindowAttentionMerger.forward",
                "window_index = window_index.to(device)",
                "torch_compilable_check(",
            ),
            *attention("MiniCPMOcrVisionAttention"),
        ),
        sites("get_vision_nearest_position_ids", "pos_ids_list.append(", file=VISION),
    ),
    "MiniCPM-OCR merger": Tower(
        merger,
        sites(
            "MiniCPMOcrMerger.forward",
            "hidden_states[0, start : start + num_patches, :]",
            "if height % merge_h != 0 or width % merge_w != 0:",
            "hidden_state.view(merged_h, merge_h, merged_w, merge_w, inner_dim)",
        ),
        sites("MiniCPMOcrMerger.forward", "for batch_idx in range(len(target_sizes)):"),
    ),
    "Mistral 3 projector": Tower(projector(lists=False), MERGED, MERGED_LOOPS),
    "Mistral 3 projector of lists": Tower(projector(lists=True), MERGED, MERGED_LOOPS),
    "Moonshine": Tower(
        model("MoonshineEncoder", "MoonshineConfig", {
            "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
        }, waveforms),
        *MASKED,
    ),
    "Muse Spark": Tower(
        model("MuseSparkVisionModel", "MuseSparkVisionConfig", LAYERS | {
            "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        }, on_grids(96, 96, name="grid_thw", layouts=VIDEOS)),
        (
            *QWEN3, *WINDOW_INDEX, *PIXEL_SHUFFLE,
            *sites(
                "MuseSparkVisionPatchEmbedder.forward",
                "get_vision_interpolation_indices_and_weights(",  # of `grid_thw[:, [0, 2, 1]]`: a list is a host tensor
            ),
            *sites(
                "MuseSparkVisionModel.forward",
                "hidden_states = hidden_states[window_index, :]",
                "position_ids = position_ids[window_index, :]",
                "hidden_states = hidden_states[reverse_indices, :]",
            ),
            *attention("MuseSparkVisionAttention"),
        ),
    ),
    "Parakeet": Tower(
        model("ParakeetEncoder", "ParakeetEncoderConfig", LAYERS | {
            "num_mel_bins": 16, "subsampling_conv_channels": 16, "subsampling_factor": 4, "conv_kernel_size": 5,
        }, lambda: spectrograms(160)),
        NONE,
    ),
    "PE patch embedder": Tower(
        patch_embedder,
        (
            *sites("PeVideoEncoderPatchEmbedder.forward", "torch.cat([padding_mask[:, [0]], padding_mask], dim=1)"),
            *sites("PeVideoMaskedGroupNorm.forward", "mean = torch.masked.mean(", "var = torch.masked.var("),
        ),
    ),
    "Pix2Struct": Tower(
        model("Pix2StructVisionModel", "Pix2StructVisionConfig", LAYERS | {
            "patch_embed_hidden_size": 48, "d_ff": 48, "d_kv": 8, "seq_len": 40,
        }, flattened_patches),
        *MASKED,
    ),
    "Pixtral of lists": Tower(
        model("PixtralVisionModel", "PixtralVisionConfig", PATCHES, images_of_one_height),
        PIXTRAL,
        sites("PixtralVisionModel.forward", "hpos_ids, wpos_ids = torch.meshgrid("),
    ),
    "SuperPoint": Tower(
        model("SuperPointForKeypointDetection", "SuperPointConfig", {
            "encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 16,
        }, lambda: [{"pixel_values": rows(2, 3, 32, 32, seed=seed)} for seed in range(3)]),
        (
            *sites("SuperPointInterestPointDecoder._extract_keypoints", "keypoints = torch.nonzero("),
            *sites("remove_keypoints_from_borders", "return keypoints[mask], scores[mask]"),
            *sites("SuperPointDescriptorDecoder._sample_descriptors", "divisor = divisor.to(keypoints)"),
            *sites("SuperPointForKeypointDetection.forward", "keypoints = keypoints / torch.tensor([width, height]"),
        ),
        (
            *sites(
                "SuperPointForKeypointDetection.forward",
                "keypoints = torch.zeros(", "scores = torch.zeros(", "descriptors = torch.zeros(", "mask = torch.zeros(",
                "keypoints[i, :", "scores[i, :", "descriptors[i, :", "mask[i, :",
            ),
            *sites("SuperPointDescriptorDecoder._sample_descriptors", "keypoints = keypoints.view("),
        ),
    ),
    "XLM": Tower(
        model("XLMModel", "XLMConfig", {
            "vocab_size": 100, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
        }, sentences),
        (
            *sites("XLMModel.forward", "assert lengths.max().item() <= slen"),
            *sites("get_masks", "assert lengths.max().item() <= slen"),
        ),
    ),
}  # fmt: skip
