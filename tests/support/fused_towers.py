"""Towers of SigLIP, CLIP and Whisper with random weights, whose layers run fused in `by_batch`."""

import torch
import transformers
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import varlen_graphs as vg

LAYERS = 2
SIZES = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
SOUND = {
    "d_model": 32, "encoder_layers": LAYERS, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 20,
}  # fmt: skip
TOWERS = {
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES)),
    "siglip without a head": lambda: transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(vision_use_head=False, **SIZES)
    ),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES)),
    "whisper": lambda: WhisperEncoder(transformers.WhisperConfig(**SOUND)),
}


def tower_of(name, dtype=torch.float32):
    """A tower with weights large enough that attention counts."""
    torch.manual_seed(0)
    tower = TOWERS[name]()
    for parameter in tower.parameters():
        parameter.data.mul_(3 if parameter.dim() == 2 else 1)
    return tower.to(dtype).eval().requires_grad_(False)


def batch(name, count, seed=0, dtype=torch.float32):
    shape = (8, 40) if name == "whisper" else (3, 32, 32)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoder_of(tower, **options):
    return vg.recipes.by_batch(tower, [1, 2, 4], **({"backend": "tape"} | options))
