"""Transformer blocks of SGLang's vision towers, over packed rows `[rows, dim]`."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.buffers import AttentionSchedule, Buffer, CuSeqlens, MaxSeqlen
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layouts.segments import Per
from varlen_graphs.recipes.blocks import add_norm, split_heads
from varlen_graphs.recipes.vision_tower import Segments


def segment_buffers(attn: Any, per: Per, prefix: str = "") -> list[Buffer]:
    """Return the buffers `cu_seqlens`, `max_seqlen` and `schedule`, with a prefix, for a `VisionAttention`."""
    heads, head_dim = attn.num_attention_heads_per_partition, attn.head_size
    return [
        CuSeqlens(f"{prefix}cu_seqlens", per=per),
        MaxSeqlen(f"{prefix}max_seqlen", per=per),
        AttentionSchedule(heads, head_dim, f"{prefix}schedule", per=per),
    ]


def run_block(
    block: Any,
    x: Tensor,
    normed: Tensor,
    next_norm: Any,
    *,
    segments: Segments,
    rotary: tuple[Tensor, Tensor],
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Run one block. `normed` is `block.norm1(x)`, and the output comes with `next_norm` of it."""
    x, normed = _add_norm(x, _attend(block.attn, normed, segments, rotary, backend), block.norm2)
    return _add_norm(x, block.mlp(normed), next_norm)


def _add_norm(x: Tensor, change: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return `x + change` and its norm; SGLang's RMS norm adds and normalises in one launch, in place."""
    if norm is None or isinstance(norm, nn.LayerNorm):
        return add_norm(x, change, norm)
    normed, total = norm(change, residual=x)
    return total, normed


def _attend(
    attn: Any, x: Tensor, segments: Segments, rotary: tuple[Tensor, Tensor], backend: AttentionBackend
) -> Tensor:
    qkv, _ = attn.qkv_proj(x)
    q, k, v = split_heads(qkv, attn.num_attention_heads_per_partition, attn.head_size)
    q, k = apply_rotary(q, k, *rotary)
    cu_seqlens, max_seqlen, schedule = segments
    attended = varlen_attention(
        q, k, v, cu_seqlens, max_seqlen, scale=attn.softmax_scale, schedule=schedule, backend=backend
    )
    out, _ = attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
    projected: Tensor = out
    return projected
