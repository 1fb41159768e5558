"""Recipes for the vision towers of vLLM 0.33: its own forwards, with their encoder metadata computed in the graph.

A graph holds `type(tower).forward(tower, x, None, encoder_metadata=...)`, what vLLM's own encoder graphs hold. Follows
`prepare_encoder_metadata` of `vllm/model_executor/models/{qwen2_5_vl,qwen3_vl,glm4_1v}.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import (
    AttentionSchedule,
    Buffer,
    CuSeqlens,
    GridPositions,
    Interpolation,
    MaxSeqlen,
    WindowIndex,
)
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.engines.vllm.attention import SCHEDULE
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.segments import Per, Windows
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.registry import register

TOWERS = ("Qwen2_5_VisionTransformer", "Qwen3_VisionTransformer", "Glm4vVisionTransformer")
"""Names of the classes with a recipe here. Subclasses in vLLM have other metadata."""


@register("Qwen3_VisionTransformer", "Glm4vVisionTransformer")
def vllm_positions(
    tower: Any, budgets: Budgets | None = None, *, row_dtype: torch.dtype | None = None, **options: Any
) -> GraphedEncoder:
    """Graph vLLM's tower of Qwen3-VL or GLM-4.1V: position embeddings, and a segment a frame.

    The encoder is called as the tower is, with `(x, grid_thw)`, and returns its tensor `[rows / 4, out]`.

    Args:
        tower: `model.visual`.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        row_dtype: `torch.uint8` where vLLM normalises bytes on the device, in the tower; `None` for floating rows.
        **options: Other arguments of `GraphedEncoder`.
    """

    def forward(
        tower: Any, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, positions: Tensor,
        pos_embeds: Tensor,
    ) -> Tensor:  # fmt: skip
        metadata = _rotary(tower, positions) | {
            "pos_embeds": pos_embeds,
            "cu_seqlens": _scheduled(cu_seqlens, schedule),
            "max_seqlen": max_seqlen,
        }
        out: Tensor = type(tower).forward(tower, x, None, encoder_metadata=metadata)
        return out

    embeddings = (
        Interpolation(table="embeddings.position_embedding.weight", mode="bicubic", order="merge_block")
        if hasattr(tower, "embeddings")
        else Interpolation(align_corners=True, order="merge_block", accum_dtype=None)
    )
    buffers = [*_segments(tower, "frame"), _positions(tower), embeddings]
    return _encoder(tower, budgets, row_dtype, buffers, forward, options)


@register("Qwen2_5_VisionTransformer")
def vllm_windows(
    tower: Any, budgets: Budgets | None = None, *, row_dtype: torch.dtype | None = None, **options: Any
) -> GraphedEncoder:
    """Graph vLLM's tower of Qwen2.5-VL, most of whose layers attend within windows.

    The encoder is called as the tower is, with `(x, grid_thw)`, and returns its tensor `[rows / 4, out]`.

    Args:
        tower: `model.visual`.
        budgets: As for `GraphedEncoder`; every window takes a segment. `None` is `Ladder()`, as far as memory and time
            allow.
        row_dtype: `torch.uint8` where vLLM normalises bytes on the device, in the tower; `None` for floating rows.
        **options: Other arguments of `GraphedEncoder`.
    """

    def forward(
        tower: Any, x: Tensor, window_index: Tensor, reverse_indices: Tensor, positions: Tensor,
        cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        cu_window_seqlens: Tensor, max_window_seqlen: int, window_schedule: TileSchedule,
    ) -> Tensor:  # fmt: skip
        tokens = rearrange(positions, "(tokens unit) axes -> tokens unit axes", unit=tower.spatial_merge_unit)
        metadata = _rotary(tower, tokens[window_index].flatten(0, 1)) | {
            "window_index": window_index,
            "reverse_indices": reverse_indices,
            "cu_seqlens": _scheduled(cu_seqlens, schedule),
            "cu_window_seqlens": _scheduled(cu_window_seqlens, window_schedule),
            "max_seqlen_full": max_seqlen,
            "max_seqlen_window": max_window_seqlen,
        }
        out: Tensor = type(tower).forward(tower, x, None, encoder_metadata=metadata)
        return out

    window = Windows(tower.window_size // tower.spatial_merge_size // tower.patch_size)
    buffers = [
        WindowIndex(window),
        WindowIndex(window, "reverse_indices", inverse=True),
        _positions(tower),
        *_segments(tower, "frame"),
        *_segments(tower, window, "cu_window_seqlens", "max_window_seqlen", "window_schedule"),
    ]
    return _encoder(tower, budgets, row_dtype, buffers, forward, options)


def _encoder(
    tower: Any,
    budgets: Budgets | None,
    row_dtype: torch.dtype | None,
    buffers: list[Buffer],
    forward: Callable[..., Tensor],
    options: dict[str, Any],
) -> GraphedEncoder:
    """Return the encoder of a tower that takes `x` `[rows, pixels]` and `grid_thw`."""
    rows = InputRows("x", (tower.patch_embed.proj.weight[0].numel(),), row_dtype)
    layout = GridTHW("grid_thw", merge=tower.spatial_merge_size)
    spec = BufferSpec(
        rows=rows, layout=layout, buffers=buffers, outputs=Rows(every=tower.spatial_merge_size**2), declared_by="recipe"
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _segments(
    tower: Any, per: Per, cu_seqlens: str = "cu_seqlens", longest: str = "max_seqlen", schedule: str = "schedule"
) -> list[Buffer]:
    """Return the buffers of attention within segments, under these names."""
    attention = tower.blocks[0].attn.attn
    shape = attention.num_heads, attention.head_size
    return [CuSeqlens(cu_seqlens, per), MaxSeqlen(longest, per), AttentionSchedule(*shape, schedule, per)]


def _positions(tower: Any) -> GridPositions:
    """Return the buffer of row and column of each patch, which the tower looks up in its rotary table."""
    return GridPositions("positions", order="merge_block", largest=len(tower.rotary_pos_emb.cos_sin_cache))


def _rotary(tower: Any, positions: Tensor) -> dict[str, Any]:
    """Look the rotary embeddings of rows up, `[rows, head_dim / 2]` each."""
    cos, sin = tower.rotary_pos_emb.cos_sin_cache.chunk(2, dim=-1)
    return {"rotary_pos_emb_cos": cos[positions].flatten(1), "rotary_pos_emb_sin": sin[positions].flatten(1)}


def _scheduled(cu_seqlens: Tensor, schedule: TileSchedule) -> Tensor:
    """Attach its tile schedule to `cu_seqlens`, for `VarlenAttention`."""
    setattr(cu_seqlens, SCHEDULE, schedule)
    return cu_seqlens
