"""Recipes for the vision towers of vLLM 0.33: fused forwards over vLLM's layers, with metadata computed in the graph.

Follows `vllm/model_executor/models/{qwen2_5_vl,qwen3_vl,glm4_1v}.py`, whose submodules it calls by name. Rotary
embeddings come from the table that vLLM has, in the dtype of the tower.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from vllm.model_executor.models.utils import cast_overflow_tensors

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import (
    AttentionSchedule,
    Buffer,
    CuSeqlens,
    GridPositions,
    MaxSeqlen,
    WindowIndex,
    interpolate_positions,
)
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.engines.vllm.blocks import blocks_of, mlp, norm, patch_convolution
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per, Windows
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import rms_norm
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import item_table
from varlen_graphs.recipes.vision_tower import Segments, run_block, with_next_norm

TOWERS = ("Qwen2_5_VisionTransformer", "Qwen3_VisionTransformer", "Glm4vVisionTransformer")
"""Names of the classes with a recipe here. Subclasses in vLLM have other metadata."""


@register("Qwen3_VisionTransformer")
def vllm_qwen3_vl(
    tower: Any, budgets: Budgets | None = None, *, row_dtype: torch.dtype | None = None, **options: Any
) -> GraphedEncoder:
    """Graph vLLM's tower of Qwen3-VL: a segment a frame, and deepstack features beside the output.

    The encoder is called as the tower is, with `(x, grid_thw)`, and returns its tensor `[rows / 4, out * (1 + layers)]`
    with the features of so many layers.

    Args:
        tower: `model.visual`.
        budgets: As for `GraphedEncoder`.
        row_dtype: `torch.uint8` where vLLM normalises bytes on the device, in the tower; `None` for floating rows.
        **options: Other arguments of `GraphedEncoder`.
    """

    def forward(
        tower: Any, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, positions: Tensor,
        table: ItemTable,
    ) -> Tensor:  # fmt: skip
        frames, rotary = Segments(cu_seqlens, max_seqlen, schedule), _rotary(tower, positions)
        x = interpolate_positions(
            tower.pos_embed.weight, table, align_corners=True, order="merge_block", accum_dtype=None,
            add=_patches(tower, x),
        ).to(tower.dtype)  # fmt: skip
        blocks, features = blocks_of(tower), []
        normed = blocks[0].norm1(x)
        for index, (block, next_norm) in enumerate(with_next_norm(blocks)):
            x, normed = run_block(block, x, normed, next_norm, mlp, segments=frames, rotary=rotary, backend="auto")
            if index in tower.deepstack_visual_indexes:
                at = tower.deepstack_visual_indexes.index(index)
                features.append(tower.deepstack_merger_list[at](x))
        return torch.cat([tower.merger(x), *features], dim=1)

    buffers = [*_segments(tower, "frame"), _positions(tower), item_table()]
    return _encoder(tower, budgets, row_dtype, buffers, forward, options)


@register("Glm4vVisionTransformer")
def vllm_glm4v(
    tower: Any, budgets: Budgets | None = None, *, row_dtype: torch.dtype | None = None, **options: Any
) -> GraphedEncoder:
    """Graph vLLM's tower of GLM-4.1V: a segment a frame.

    The encoder is called as the tower is, with `(x, grid_thw)`, and returns its tensor `[rows / 4, out]`.

    Args:
        tower: `model.visual`.
        budgets: As for `GraphedEncoder`.
        row_dtype: `torch.uint8` where vLLM normalises bytes on the device, in the tower; `None` for floating rows.
        **options: Other arguments of `GraphedEncoder`.
    """

    def forward(
        tower: Any, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, positions: Tensor,
        table: ItemTable,
    ) -> Tensor:  # fmt: skip
        frames, rotary = Segments(cu_seqlens, max_seqlen, schedule), _rotary(tower, positions)
        x = interpolate_positions(
            tower.embeddings.position_embedding.weight, table, mode="bicubic", order="merge_block",
            add=rms_norm(_patches(tower, x), norm(tower.post_conv_layernorm)),
        ).to(tower.dtype)  # fmt: skip
        blocks = blocks_of(tower)
        normed = rms_norm(x, blocks[0].norm1)
        for block, next_norm in with_next_norm(blocks, last=norm(tower.post_layernorm)):
            x, normed = run_block(block, x, normed, next_norm, mlp, segments=frames, rotary=rotary, backend="auto")
        side = tower.spatial_merge_size
        tokens = rearrange(normed, "(tokens h w) dim -> tokens (dim h w)", h=side, w=side)
        out: Tensor = tower.merger(patch_convolution(tokens, tower.downsample))
        return out

    buffers = [*_segments(tower, "frame"), _positions(tower), item_table()]
    return _encoder(tower, budgets, row_dtype, buffers, forward, options)


@register("Qwen2_5_VisionTransformer")
def vllm_qwen2_5_vl(
    tower: Any, budgets: Budgets | None = None, *, row_dtype: torch.dtype | None = None, **options: Any
) -> GraphedEncoder:
    """Graph vLLM's tower of Qwen2.5-VL, most of whose layers attend within windows.

    The encoder is called as the tower is, with `(x, grid_thw)`, and returns its tensor `[rows / 4, out]`.

    Args:
        tower: `model.visual`.
        budgets: As for `GraphedEncoder`; every window takes a segment.
        row_dtype: `torch.uint8` where vLLM normalises bytes on the device, in the tower; `None` for floating rows.
        **options: Other arguments of `GraphedEncoder`.
    """

    def forward(
        tower: Any, x: Tensor, window_index: Tensor, reverse_indices: Tensor, positions: Tensor,
        cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        cu_window_seqlens: Tensor, max_window_seqlen: int, window_schedule: TileSchedule,
    ) -> Tensor:  # fmt: skip
        def in_windows(rows: Tensor) -> Tensor:
            tokens = rearrange(rows, "(tokens unit) dim -> tokens unit dim", unit=tower.spatial_merge_unit)
            return rearrange(tokens[window_index], "tokens unit dim -> (tokens unit) dim")

        frames = Segments(cu_seqlens, max_seqlen, schedule)
        windows = Segments(cu_window_seqlens, max_window_seqlen, window_schedule)
        x, rotary = _patches(tower, in_windows(x)), _rotary(tower, in_windows(positions))
        blocks = blocks_of(tower)
        normed = rms_norm(x, blocks[0].norm1)
        for index, (block, next_norm) in enumerate(with_next_norm(blocks)):
            segments = frames if index in tower.fullatt_block_indexes else windows
            x, normed = run_block(block, x, normed, next_norm, mlp, segments=segments, rotary=rotary, backend="auto")
        if x.dtype == torch.float16:
            x = cast_overflow_tensors(x)
        out: Tensor = tower.merger(x)[reverse_indices]
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


def _rotary(tower: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Look the cosines and sines of rows up, `[rows, head_dim]` each."""
    cos, sin = (half[positions].flatten(1) for half in tower.rotary_pos_emb.cos_sin_cache.chunk(2, dim=-1))
    return torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)


def _patches(tower: Any, x: Tensor) -> Tensor:
    """Embed patches `[rows, pixels]`, floating or bytes that the tower normalises, as `[rows, dim]`."""
    return patch_convolution(tower.input_norm(x, tower.dtype), tower.patch_embed.proj)
