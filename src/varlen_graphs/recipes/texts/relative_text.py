"""Packed forwards of text encoders whose attention adds learned biases by relative position: T5, UMT5, MPNet.

Attention of these models takes biases of all pairs of tokens; `varlen_attention` takes one entry for each offset.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.attention.api import tile_schedule, varlen_attention
from varlen_graphs.recipes.blocks import project_heads
from varlen_graphs.recipes.texts.text_probe import ROWS
from varlen_graphs.recipes.vision_tower import recorded

MPNET_DISTANCE = 128
"""Distance from which on all positions share the last bucket of MPNet."""


def is_relative(model: nn.Module) -> bool:
    """Return True if a model has a table of biases by relative position."""
    return any(name.endswith("relative_attention_bias") for name, _ in model.named_modules())


def relative_forward(
    model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    output_hidden_states: Any = None, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run the submodules of a model on token ids and positions `[rows]`, and return the fields of its output."""
    encoder = getattr(model, "encoder", model)
    layers = _t5 if hasattr(encoder, "block") else _mpnet
    states = layers(model, ids, positions, cu_seqlens, max_seqlen)
    return {ROWS: states[-1]} | recorded(states, states[-1], output_hidden_states)


def _t5(model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> list[Tensor]:
    stack = getattr(model, "encoder", model)
    first = stack.block[0].layer[0].SelfAttention
    heads, head_dim = first.n_heads, first.key_value_proj_dim
    attend = _attention(cu_seqlens, max_seqlen, len(ids), heads, head_dim)
    x = stack.dropout(stack.embed_tokens(ids))
    states, bias = [], None
    for block in stack.block:
        states.append(x)
        part, attention = block.layer[0], block.layer[0].SelfAttention
        if attention.has_relative_attention_bias:  # in T5 the first layer has the biases of all
            bias = _t5_bias(attention)
        q, k, v = project_heads(part.layer_norm(x), (attention.q, attention.k, attention.v), heads, head_dim)
        x = _finite(x + part.dropout(attention.o(attend(q, k, v, bias=bias, scale=1.0).flatten(1))))
        x = _finite(block.layer[-1](x))
    return [*states, stack.dropout(stack.final_layer_norm(x))]


def _t5_bias(attention: Any) -> Tensor:
    """Return the biases `[heads, 2 * reach + 1]` of a T5 attention: past its largest distance all are the same."""
    reach = attention.relative_attention_max_distance
    before = attention.compute_bias(reach + 1, 1)[0, :, 1:, 0]
    return torch.cat([before.flip(1), attention.compute_bias(1, reach + 1)[0, :, 0]], 1)


def _finite(x: Tensor) -> Tensor:
    """Replace infinities in float16, as T5 does: by the largest number but 1000."""
    if x.dtype != torch.float16:
        return x
    most = torch.finfo(x.dtype).max - 1000
    return x.nan_to_num(torch.nan, most, -most)


def _mpnet(model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> list[Tensor]:
    encoder, attention = model.encoder, model.encoder.layer[0].attention.attn
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    attend = _attention(cu_seqlens, max_seqlen, len(ids), heads, head_dim)
    offsets = torch.arange(-MPNET_DISTANCE, MPNET_DISTANCE + 1, device=ids.device)
    bias = encoder.relative_attention_bias(encoder.relative_position_bucket(offsets)).T.contiguous()
    x = model.embeddings(input_ids=ids[None], position_ids=positions[None])[0]
    states = [x]
    for layer in encoder.layer:
        part, attention = layer.attention, layer.attention.attn
        q, k, v = project_heads(x, (attention.q, attention.k, attention.v), heads, head_dim)
        x = part.LayerNorm(part.dropout(attention.o(attend(q, k, v, bias=bias).flatten(1))) + x)
        x = layer.output(layer.intermediate(x), x)
        states.append(x)
    return states


def _attention(cu_seqlens: Tensor, max_seqlen: int, rows: int, heads: int, head_dim: int) -> Callable[..., Tensor]:
    """Return `varlen_attention` in segments that all layers share."""
    schedule = tile_schedule(cu_seqlens, max_seqlen, rows=rows, heads=heads, head_dim=head_dim)
    return partial(varlen_attention, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, schedule=schedule)
