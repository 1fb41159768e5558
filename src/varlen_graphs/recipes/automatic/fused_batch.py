"""Forwards of towers that take a batch of inputs of one size, with fused layers: SigLIP, CLIP, Whisper."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import tile_schedule
from varlen_graphs.recipes.blocks import siglip_layers, whisper_layers
from varlen_graphs.recipes.fused import Fused
from varlen_graphs.recipes.towers import output_class
from varlen_graphs.recipes.vision_tower import recorded


def _siglip(
    tower: Any, pixel_values: Tensor, interpolate_pos_encoding: bool = False, output_hidden_states: Any = None
) -> Any:
    inner = getattr(tower, "vision_model", tower)  # in older versions of transformers
    x = inner.embeddings(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
    states, last = _layers(siglip_layers, inner.encoder.layers, x, inner.post_layernorm)
    pooled = inner.head(last) if inner.use_head else None
    return output_class(inner, "BaseModelOutputWithPooling")(
        last_hidden_state=last, pooler_output=pooled, **recorded(states, states[-1], output_hidden_states)
    )


def _clip(
    tower: Any, pixel_values: Tensor, interpolate_pos_encoding: bool = False, output_hidden_states: Any = None
) -> Any:
    inner = getattr(tower, "vision_model", tower)
    x = inner.pre_layrnorm(inner.embeddings(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding))
    states, last = _layers(siglip_layers, inner.encoder.layers, x, None)
    return output_class(inner, "BaseModelOutputWithPooling")(
        last_hidden_state=last,
        pooler_output=inner.post_layernorm(last[:, 0]),
        **recorded(states, last, output_hidden_states),
    )


def _whisper(tower: Any, input_features: Tensor, output_hidden_states: Any = None) -> Any:
    if input_features.shape[-1] != tower.config.max_source_positions * tower.conv1.stride[0] * tower.conv2.stride[0]:
        return type(tower).forward(tower, input_features)  # raises
    x = F.gelu(tower.conv2(F.gelu(tower.conv1(input_features)))).transpose(1, 2)
    positions = torch.arange(tower.embed_positions.num_embeddings, device=x.device)
    states, last = _layers(whisper_layers, tower.layers, x + tower.embed_positions(positions), tower.layer_norm)
    return output_class(tower, "BaseModelOutput")(
        last_hidden_state=last, **recorded(states, last, output_hidden_states)
    )


def _layers(run: Callable[..., Tensor], layers: Any, x: Tensor, last: Any) -> tuple[Sequence[Tensor], Tensor]:
    """Run layers on `x`, `[items, length, dim]`; return all states, and the norm `last` of the last one."""
    items, length, _ = x.shape
    attn = layers[0].self_attn
    cu_seqlens = torch.arange(0, (items + 1) * length, length, dtype=torch.int32, device=x.device)
    schedule = tile_schedule(cu_seqlens, length, rows=items * length, heads=attn.num_heads, head_dim=attn.head_dim)
    states: list[Tensor] = []
    rows = rearrange(x, "items length dim -> (items length) dim")
    out = run(layers, rows, last, cu_seqlens, length, schedule, "auto", states=states)
    *states, out = (rearrange(each, "(items length) dim -> items length dim", items=items) for each in (*states, out))
    return states, out


_LAYERS_OF_SIGLIP = r"vision_model|(vision_model\.)?encoder(\.layers\.\d+(\.self_attn|\.mlp)?)?"

FUSED: dict[str, Fused] = {
    "CLIPVisionModel": Fused(_clip, _LAYERS_OF_SIGLIP),
    "CLIPVisionTransformer": Fused(_clip, _LAYERS_OF_SIGLIP),
    "SiglipVisionModel": Fused(_siglip, _LAYERS_OF_SIGLIP),
    "SiglipVisionTransformer": Fused(_siglip, _LAYERS_OF_SIGLIP),
    "WhisperEncoder": Fused(_whisper, r"layers\.\d+(\.self_attn)?"),
}
"""Fused forwards, by the class of the tower."""
