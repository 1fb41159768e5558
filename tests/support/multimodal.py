"""Whole models with towers that no recipe is for, tiny and with random weights, and inputs for them."""

import importlib

import pytest
import torch

SHOWN = 98
"""Id of the token for an image or sound."""

VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 512,
}  # fmt: skip

HEARING = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 8,
    "max_source_positions": 20,
}  # fmt: skip

HEARING_AS_TEXT = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 8,
    "head_dim": 16,
}  # fmt: skip

TILED = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 16, "patch_size": 4, "max_num_tiles": 2, "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 96, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}  # fmt: skip

FLORENCE = {
    "embed_dim": [8, 8], "depths": [1, 1], "num_heads": [2, 2], "num_groups": [2, 2], "patch_size": [7, 3],
    "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True], "window_size": 4,
    "projection_dim": 32, "drop_path_rate": 0.0, "max_position_embeddings": 16, "max_temporal_embeddings": 8,
}  # fmt: skip

BART = {
    "model_type": "bart", "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

QFORMER = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "encoder_hidden_size": 32, "cross_attention_frequency": 1,
}  # fmt: skip

SPOKEN = {
    **HEARING, "vocab_size": 99, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

SEGMENTING = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64, "image_size": 16,
    "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "output_channels": 16,
}  # fmt: skip

CONTRASTED = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def vision(kind, **changes):
    return {**VISION, "model_type": kind, **changes}


def text(kind, **changes):
    return {**TEXT, "model_type": kind, **changes}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(shown, after=3):
    return torch.tensor([[1, *[SHOWN] * shown, *range(5, 5 + after)]])


def images(count, tokens):
    """Return a function that makes inputs of images of one size."""
    return lambda seed: {"input_ids": ids(tokens), "pixel_values": random(count, 3, 16, 16, seed=seed)}


def tiles(seed):
    return {
        "input_ids": ids(16 + 4 * 8 + 4),
        "pixel_values": random(1, 3, 3, 16, 16, seed=seed),
        "image_sizes": torch.tensor([[16, 32]]),
    }


def typed(tokens, kind):
    def inputs(seed):
        types = torch.tensor([[0, *[kind] * tokens, 0, 0, 0]])
        return {**images(1, tokens)(seed), "token_type_ids": types}

    return inputs


def tiled(seed):
    return {
        "input_ids": ids(1),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "pixel_values": random(1, 1, 2, 3, 16, 16, seed=seed),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1]]]),
        "cross_attention_mask": torch.ones(1, 5, 1, 2, dtype=torch.long),
    }


def heard(tokens, **more):
    return lambda seed: {"input_ids": ids(tokens), "input_features": random(1, 8, 40, seed=seed), **more}


def masked(seed):
    return {
        "input_ids": ids(10 + 7),
        "attention_mask": torch.ones(1, 21, dtype=torch.long),
        "input_features": random(2, 8, 40, seed=seed),
        "feature_attention_mask": torch.tensor([[1] * 40, [1] * 30 + [0] * 10]),
    }


def contrasted(seed):
    texts = {"input_ids": torch.tensor([[1, 5, 2], [1, 6, 2]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    return {**texts, "pixel_values": random(2, 3, 16, 16, seed=seed)}


SHOWS = {"image_token_id": SHOWN, "image_token_index": SHOWN}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16]]}

MULTIMODAL = {
    "llava": (
        "LlavaForConditionalGeneration",
        {"vision_config": vision("clip_vision_model"), "text_config": text("llama"), "vision_feature_layer": -2},
        images(2, 32),
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        {"vision_config": vision("clip_vision_model"), "text_config": text("llama"), **PINPOINTS},
        tiles,
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {"vision_config": vision("siglip_vision_model"), "text_config": text("qwen2"), **PINPOINTS},
        tiles,
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "vision_config": vision("internvl_vision", image_size=[16, 16], patch_size=[4, 4]),
            "text_config": text("qwen2"),
        },
        images(2, 8),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": vision("siglip_vision_model"),
            "text_config": text("gemma3_text"),
            "mm_tokens_per_image": 4,
        },
        typed(4, 1),
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": vision("siglip_vision_model", projection_dim=32),
            "text_config": text("gemma"),
            "projection_dim": 32,
        },
        typed(16, 0),
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "vision_config": vision(
                "llama4_vision_model", intermediate_size=128, vision_output_dim=32, projector_input_dim=32,
                projector_output_dim=32,
            ),
            "text_config": text("llama4_text", intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=64),
        },
        images(2, 8),
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {"vision_config": TILED, "text_config": text("mllama_text_model", cross_attention_layers=[1])},
        tiled,
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        {
            "vision_config": vision("siglip_vision_model"),
            "text_config": text("cohere2", sliding_window=8, layer_types=["full_attention"] * 2),
            "downsample_factor": 2,
        },
        images(2, 8),
    ),
    "blip_2": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": VISION,
            "qformer_config": QFORMER,
            "text_config": text("opt", ffn_dim=64, word_embed_proj_dim=32),
            "num_query_tokens": 4,
        },
        images(1, 4),
    ),
    "ovis2": (
        "Ovis2ForConditionalGeneration",
        {
            "vision_config": {**VISION, "num_visual_indicator_tokens": 2, "vocab_size": 32, "hidden_stride": 1},
            "text_config": text("qwen2"),
            "visual_indicator_token_ids": [90, 91],
            "hidden_size": 32,
            "vocab_size": 99,
        },
        images(1, 16),
    ),
    "florence2": ("Florence2ForConditionalGeneration", {"vision_config": FLORENCE, "text_config": BART}, images(1, 5)),
    "blip": (
        "BlipForConditionalGeneration",
        {
            "vision_config": {**VISION, "initializer_range": 0.02},
            "text_config": {**TEXT, "encoder_hidden_size": 32, "projection_dim": 16, "sep_token_id": 2, "initializer_range": 0.02},
        },
        lambda seed: {"input_ids": torch.tensor([[1, 5, 6]]), "pixel_values": random(1, 3, 16, 16, seed=seed)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        SPOKEN,
        lambda seed: {"input_features": random(2, 8, 40, seed=seed)},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "audio_config": {**HEARING_AS_TEXT, "model_type": "voxtral_encoder", "max_source_positions": 20},
            "text_config": text("llama"),
            "audio_token_id": SHOWN,
            "hidden_size": 32,
        },
        heard(5),
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {**HEARING, "model_type": "qwen2_audio_encoder"},
            "text_config": text("qwen2"),
            "audio_token_id": SHOWN,
            "audio_token_index": SHOWN,
        },
        masked,
    ),
    "glmasr": (
        "GlmAsrForConditionalGeneration",
        {
            "audio_config": {
                **HEARING_AS_TEXT, "model_type": "glmasr_encoder", "num_key_value_heads": 2,
                "max_position_embeddings": 20,
            },
            "text_config": text("llama"),
            "audio_token_id": SHOWN,
        },
        heard(5, input_features_mask=torch.ones(1, 40, dtype=torch.long)),
    ),
    "clip": (
        "CLIPModel",
        {"vision_config": VISION, "text_config": CONTRASTED, "projection_dim": 16},
        contrasted,
    ),
    "siglip": (
        "SiglipModel",
        {"vision_config": VISION, "text_config": {**CONTRASTED, "projection_size": 32}},
        lambda seed: {name: value for name, value in contrasted(seed).items() if name != "attention_mask"},
    ),
}  # fmt: skip
"""The class of a model, what its configuration needs, and its inputs for a seed, by the package of transformers."""


def multimodal_model(family, device="cpu", dtype=torch.float32):
    """Return a model whose tokens depend on what it sees or hears: default weights would hardly let them."""
    name, options, _ = MULTIMODAL[family]
    where = f"transformers.models.{family}.modeling_{family}"
    kind = getattr(pytest.importorskip(where, reason=f"this transformers has no {family}"), name)
    shows = SHOWS if "vision_config" in options else {}
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**{**shows, **options}), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # gates that begin closed, projections that begin at zero
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.mul_(2)
    return model.to(device)


def multimodal_inputs(family, model, seed=0):
    """Return what a processor makes of words with images or sound."""
    inputs = MULTIMODAL[family][2](seed)
    return {k: v.to(model.device, model.dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def answer(model, inputs, **asked):
    """Return the logits of a model, or the scores of pairs of images and texts."""
    first = {"decoder_input_ids": torch.ones(2, 1, dtype=torch.long)} if "input_ids" not in inputs else {}
    output = model(**inputs, **first, **asked)
    return output.logits if "logits" in output else output.logits_per_image


TOWERS = {
    "ViTModel": VISION,
    "Dinov2Model": VISION,
    "DINOv3ViTModel": VISION,
    "BeitModel": VISION,
    "SiglipVisionModel": VISION,
    "CLIPVisionModelWithProjection": {**VISION, "projection_dim": 16},
    "SwinModel": {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    },
    "Swinv2Model": {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    },
    "ConvNextModel": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "image_size": 32},
    "DINOv3ConvNextModel": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "image_size": 32},
    "VideoMAEModel": {**VISION, "num_frames": 4},
    "TimesformerModel": {**VISION, "num_frames": 4},
    "SamVisionModel": SEGMENTING,
    "SamHQVisionModel": SEGMENTING,
    "VivitModel": {**VISION, "num_frames": 4, "tubelet_size": [2, 4, 4]},
    "JanusVisionModel": VISION,
    "Molmo2VisionModel": {
        **{name: value for name, value in VISION.items() if name != "image_size"}, "num_key_value_heads": 2,
        "head_dim": 16, "image_size": [16, 16],
    },
}  # fmt: skip
"""Classes of encoders by themselves, and what their configurations need."""


def tower_model(name, device="cpu", **changes):
    """Return an encoder."""
    import transformers

    kind = getattr(transformers, name, None)
    if kind is None:
        try:
            kind = getattr(importlib.import_module("transformers.models.molmo2.modeling_molmo2"), name)
        except ModuleNotFoundError:
            pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return kind(kind.config_class(**TOWERS[name], **changes)).to(device).eval().requires_grad_(False)
