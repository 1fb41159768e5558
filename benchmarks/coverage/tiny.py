"""Tiny models of any class of transformers, from its default configuration, with weights large enough for errors."""

import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.whisper import modeling_whisper

from benchmarks.generic import enlarge

HEADS = ("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads", "n_heads", "n_head")
WIDTHS = ("hidden_size", "embed_dim", "d_model", "dim", "n_embd", "hidden_dim", "width")
LAYERS = re.compile(r"(num_(hidden_|encoder_|decoder_|global_)?layers|depth|n_layers?|(en|de)coder_layers|layers)$")
OF_WIDTH = re.compile(r"(size|dim|width|channel|features|output_dim|d_model|embd)")
NOT_WIDTHS = re.compile(
    r"(image|patch|vocab|window|kernel|crop|tile|pool|max_|merge|position|batch|input_size|num_chan|in_chan)"
)
SMALL = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 320,
}  # fmt: skip
DEPTH, HEAD_COUNT = 3, 2

SAM = {
    "vision_config.image_size": 64, "vision_config.patch_size": 8, "vision_config.window_size": 4,
    "vision_config.global_attn_indexes": [1], "vision_config.num_hidden_layers": 2,
    "prompt_encoder_config.image_size": 64,
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "AlignModel": {
        "vision_config.image_size": 64, "vision_config.width_coefficient": 1.0, "vision_config.depth_coefficient": 0.5,
        "vision_config.hidden_dim": 1280,
    },
    "AriaForConditionalGeneration": {"vision_config.image_size": 490, "vision_config.patch_size": 14},
    "AyaVisionForConditionalGeneration": {"vision_config.image_size": 364, "vision_config.patch_size": 14},
    "BigBirdModel": {"attention_type": "original_full"},
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 9, **{f"IMGIMG{one}{two}Z": 10 for one in "ABCDEFGHIJ" for two in "ABCDEFGHIJ"}},
        "vq_config.resolution": 64, "vq_config.base_channels": 32, "vq_config.num_embeddings": 100,
    },
    "CohereCompassForConditionalGeneration": {
        "text_config.rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config.mlp_layer_types": ["dense"] * DEPTH, "vision_config.sam_config.image_size": 256,
        "vision_config.sam_config.mlp_dim": 256, "vision_config.sam_config.downsample_channels": [64, 256],
    },
    "Dots3NoteForConditionalGeneration": {"audio_config.adapter_input_size": 128},
    "DeepseekVLHybridForConditionalGeneration": {
        "high_res_vision_config.image_size": 256, "high_res_vision_config.mlp_dim": 256,
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 32,
    },
    "EfficientNetModel": {
        "image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280,
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": 9, "<|extra_200|>": 8, **{f"<|visual token {code:06d}|>": 10 + code for code in range(16)},
        },
        "image_size": 32, "vq_config.base_channels": 32, "vq_config.hidden_size": 128, "vq_config.codebook_size": 16,
    },
    "Gemma3ForConditionalGeneration": {"vision_config.image_size": 896, "vision_config.patch_size": 14},
    "GraniteDoclingForConditionalGeneration": {"vision_config.image_size": 128, "vision_config.patch_size": 16},
    "Granite4VisionForConditionalGeneration": {
        "image_grid_pinpoints": [[512, 1024], [1024, 512], [1024, 1024]], "deepstack_layer_map": [(1, 0)],
        "spatial_target_layers": [1], "downsample_rate": "4/8", "vision_config.image_size": 512,
    },
    "GraniteSpeechForConditionalGeneration": {"projector_config.encoder_hidden_size": 256},
    "GraniteSpeechPlusForConditionalGeneration": {"projector_config.encoder_hidden_size": 256},
    "GotOcr2ForConditionalGeneration": {"vision_config.image_size": 256, "vision_config.mlp_dim": 256},
    "HunYuanVLForConditionalGeneration": {
        "text_config.head_dim": 128,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16] * 4},
    },
    "Idefics3ForConditionalGeneration": {"vision_config.image_size": 128, "vision_config.patch_size": 16},
    "IdeficsForVisionText2Text": {"vision_config.image_size": 56},
    "KyutaiSpeechToTextForConditionalGeneration": {"codec_config.upsample_groups": 1},
    "LightOnOcrForConditionalGeneration": {"vision_config.image_size": 112},
    "Llama4ForConditionalGeneration": {
        "vision_config.intermediate_size": 384, "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64, "vision_config.vision_output_dim": 64,
    },
    "Llama4VisionModel": {
        "intermediate_size": 384, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64,
    },
    "MiniCPMOcrForConditionalGeneration": {"vision_config.insert_layer_id": 0},
    "MiniCPMV4_6ForConditionalGeneration": {"vision_config.insert_layer_id": 0},
    "MiniCPMV4_7ForConditionalGeneration": {"vision_config.insert_layer_id": 1},
    "MiniMaxM3SparseForConditionalGeneration": {"merged_hidden_size": 768},
    "Mistral3ForConditionalGeneration": {"vision_config.image_size": 112},
    "MistralLarge4ForConditionalGeneration": {"vision_config.image_size": 112},
    "MllamaForConditionalGeneration": {
        "vision_config.intermediate_layers_indices": [0, 1], "vision_config.image_size": 112,
        "vision_config.num_global_layers": 2,
    },
    "MllamaVisionModel": {"intermediate_layers_indices": [0, 1], "image_size": 112, "num_global_layers": 2},
    "Molmo2ForConditionalGeneration": {"adapter_config.vision_feature_layer": [-1, -2]},
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 768},
    "MuseSparkForConditionalGeneration": {"out_hidden_size": 768, "audio_config.num_hidden_layers": 4},
    "Phi4MultimodalForCausalLM": {"vision_config.image_size": 56, "vision_config.crop_size": 56},
    "Qwen3ASRForConditionalGeneration": {"audio_config.downsample_hidden_size": 32},
    "Qwen3OmniMoeForConditionalGeneration": {
        "talker_config.text_config.shared_expert_intermediate_size": 32, "talker_config.spatial_merge_size": 2,
    },
    "Sam2Model": {
        "vision_config.backbone_config.image_size": [128, 128], "prompt_encoder_config.image_size": 128,
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    },
    "Sam3TrackerModel": {
        "vision_config.backbone_config.image_size": 112, "vision_config.backbone_config.pretrain_image_size": 112,
        "vision_config.backbone_config.window_size": 4, "prompt_encoder_config.image_size": 112,
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    },
    "SamHQModel": SAM,
    "SamModel": SAM,
    "SmolVLMForConditionalGeneration": {"vision_config.image_size": 128, "vision_config.patch_size": 16},
    "Step3p7ForConditionalGeneration": {"vision_config.image_size": 112},
    "Swin2SRModel": {
        "image_size": 16, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "num_layers": 2,
    },
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "T5Gemma2ForConditionalGeneration": {
        "encoder.vision_config.image_size": 896, "encoder.vision_config.patch_size": 14,
    },
    "UnlimitedOcrForConditionalGeneration": {
        "vision_config.sam_config.image_size": 256, "vision_config.sam_config.mlp_dim": 256,
        "vision_config.sam_config.downsample_channels": [64, 128], "vision_config.encoder_config.image_size": 56,
    },
    "VideoPrismClipModel": {"vision_config.image_size": 36, "vision_config.num_frames": 4},
    "Wav2Vec2BertForCTC": {"vocab_size": 320},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 320},
    "VipLlavaForConditionalGeneration": {"vision_feature_layer": [-1, -2, -2, 1, 0]},
    "XmodModel": {"default_language": "en_XX"},
}  # fmt: skip
"""Settings by their paths, where the defaults of a class do not fit each other, or are large."""

PATCHES = {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64, "head_dim": 8}
"""Settings of the vision tower of Gemma 4."""

PARTS = {
    "DiffusionGemmaForBlockDiffusion": {"vision_config": ("Gemma4VisionConfig", PATCHES)},
    "Gemma4ForConditionalGeneration": {
        "audio_config": ("Gemma4AudioConfig", {}),
        "vision_config": ("Gemma4VisionConfig", PATCHES),
    },
    "NemotronH_Omni_Reasoning_V3": {
        "audio_config": ("ParakeetEncoderConfig", {"projection_hidden_size": 64, "projection_bias": False}),
    },
}
"""Configurations of towers that the defaults of a class leave out: their classes and settings, by their names."""

HEADS_OF_SOUND = ("ForXVector", "ForPreTraining", "ForSequenceClassification", "ForAudioFrameClassification")
"""Ends of names of classes that are built with layer norms, as the large models: their calls bring masks."""

INNER = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size")


def configs(config: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield a configuration and those in it."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return
    seen.add(id(config))
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from configs(value, seen)


def shrink(config: Any) -> None:
    """Make a configuration tiny in place: few layers, two heads of their size, and all widths that follow."""
    widths: dict[int, int] = {}
    for part in configs(config):
        heads = next((name for name in HEADS if isinstance(vars(part).get(name), int)), None)
        width = next((name for name in WIDTHS if isinstance(vars(part).get(name), int)), None)
        if heads and width:
            before = vars(part)[width]
            head_dim = before // vars(part)[heads]
            few = min(HEAD_COUNT, vars(part)[heads])
            after = max(16, head_dim) * few
            widths.setdefault(before, after)
            for name in INNER:
                if isinstance(vars(part).get(name), int):
                    setattr(part, name, max(16, vars(part)[name] * after // before // 16 * 16))
            for name in (*HEADS, "num_key_value_heads", "decoder_attention_heads", "kv_heads"):
                if isinstance(vars(part).get(name), int):
                    setattr(part, name, few)
    for part in configs(config):
        _shrink(part, widths)


def _shrink(part: Any, widths: dict[int, int]) -> None:
    depth = None
    for name, value in list(vars(part).items()):
        if name in SMALL and isinstance(value, int) and value > SMALL[name]:
            setattr(part, name, SMALL[name])
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif LAYERS.search(name) and "extract" not in name and value > DEPTH:
            depth = value
            setattr(part, name, DEPTH)
        elif OF_WIDTH.search(name) and not NOT_WIDTHS.search(name) and value in widths:
            setattr(part, name, widths[value])
    for name, value in list(vars(part).items()):
        if (
            name.endswith(("token_id", "token_index", "_id"))
            and isinstance(value, int)
            and value >= SMALL["vocab_size"]
        ):
            setattr(part, name, 200 + sum(map(ord, name)) % 100)
        elif name.endswith(("token_id", "token_ids")) and isinstance(value, list):
            setattr(part, name, [299])
        elif name == "conv_dim" and isinstance(value, list | tuple):
            setattr(part, name, type(value)([32] * len(value)))
        elif isinstance(value, list) and depth and len(value) == depth:
            setattr(part, name, value[:DEPTH])
        elif isinstance(value, list) and depth and "ind" in name and all(isinstance(v, int) for v in value):
            setattr(part, name, sorted({v * DEPTH // depth for v in value}))


def make(name: str) -> nn.Module:
    """Return a tiny model of a class, from its default configuration."""
    kind = getattr(transformers, name, None) or getattr(modeling_whisper, name)
    inner = {part: getattr(transformers, own)(**given) for part, (own, given) in PARTS.get(name, {}).items()}
    config = kind.config_class(**inner)
    shrink(config)
    for path, value in SETTINGS.get(name, {}).items():
        *parts, setting = path.split(".")
        setattr(reduce(getattr, parts, config), setting, value)
    if name.endswith(HEADS_OF_SOUND) and hasattr(config, "do_stable_layer_norm"):
        config.feat_extract_norm, config.do_stable_layer_norm = "layer", True
    torch.manual_seed(0)
    model: nn.Module = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    enlarge(model)
    return model.eval()
