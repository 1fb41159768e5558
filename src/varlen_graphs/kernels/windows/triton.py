"""Boundaries and order of windows, one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import ITEMS, OPTIONS, grid_position, locate, read_items, to_int32
from varlen_graphs.kernels.launch import launch

SLOTS = 16
"""Entries of the result per program."""


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "segments"])
def cu_window_seqlens_kernel(
    out, values, item_stride, column_stride, items, segments, SIDE: tl.constexpr, SLOTS: tl.constexpr
):
    """Write `out`, int32 `[segments + 1]`."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    start = tl.zeros_like(slot)
    window = tl.zeros_like(slot)
    height = tl.zeros_like(slot)
    width = tl.zeros_like(slot)
    total = tl.full([], 0, tl.int64)
    total_rows = tl.full([], 0, tl.int64)
    for first in range(0, items, ITEMS):
        t, h, w = read_items(values, item_stride, column_stride, items, first)
        rows = t * h * w
        counts = t * tl.cdiv(h, SIDE) * tl.cdiv(w, SIDE)
        ends = total + tl.cumsum(counts, 0)
        row_starts = total_rows + tl.cumsum(rows, 0) - rows
        before = slot[:, None] - to_int32(ends - counts)[None, :]  # earlier windows of the same item
        own = (before >= 0) & (slot[:, None] < to_int32(ends)[None, :])
        start += tl.sum(tl.where(own, to_int32(row_starts)[None, :], 0), 1)
        window += tl.sum(tl.where(own, before, 0), 1)
        height += tl.sum(tl.where(own, to_int32(h)[None, :], 0), 1)
        width += tl.sum(tl.where(own, to_int32(w)[None, :], 0), 1)
        total += tl.sum(counts, 0)
        total_rows += tl.sum(rows, 0)
    across = tl.maximum(tl.cdiv(width, SIDE), 1)
    per_frame = tl.maximum(tl.cdiv(height, SIDE) * across, 1)
    frame = window // per_frame
    window -= frame * per_frame
    top = window // across * SIDE
    left = window % across * SIDE
    start += frame * height * width + top * width + left * tl.minimum(height - top, SIDE)
    tl.store(out + slot, tl.where(slot < total, start, total_rows.to(tl.int32)), slot <= segments)


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "tokens"])
def window_index_kernel(
    out, values, item_stride, column_stride, items, tokens, MERGE: tl.constexpr, SIDE: tl.constexpr,
    INVERSE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write `out`, int64 `[tokens]`."""
    token = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    within, height, width = locate(token * (MERGE * MERGE), values, item_stride, column_stride, items)
    t, h, w = grid_position(within, height, width, MERGE, 0 if INVERSE else SIDE)
    y = h // MERGE
    x = w // MERGE
    down = tl.maximum(height // MERGE, 1)
    across = tl.maximum(width // MERGE, 1)
    if INVERSE:
        top = y // SIDE * SIDE
        left = x // SIDE * SIDE
        tall = tl.minimum(down - top, SIDE)
        wide = tl.minimum(across - left, SIDE)
        in_frame = top * across + left * tall + (y - top) * wide + (x - left)
    else:
        in_frame = y * across + x
    index = token - within // (MERGE * MERGE) + t * down * across + in_frame
    tl.store(out + token, tl.minimum(tl.maximum(index, 0), tokens - 1), token < tokens)


def cu_window_seqlens(values: Tensor, segments: int, side: int) -> Tensor:
    """Compute `reference.cu_window_seqlens` in one launch."""
    out = torch.empty(segments + 1, dtype=torch.int32, device=values.device)
    launch(cu_window_seqlens_kernel, (triton.cdiv(segments + 1, SLOTS),),
        out, values, *values.stride(), values.shape[0], segments, SIDE=side, SLOTS=SLOTS, **OPTIONS,
    )  # fmt: skip
    return out


def window_index(values: Tensor, tokens: int, merge: int, side: int, inverse: bool) -> Tensor:
    """Compute `reference.window_index` in one launch."""
    out = torch.empty(tokens, dtype=torch.int64, device=values.device)
    launch(window_index_kernel, (triton.cdiv(tokens, SLOTS),),
        out, values, *values.stride(), values.shape[0], tokens, MERGE=merge, SIDE=side, INVERSE=inverse, SLOTS=SLOTS,
        **OPTIONS,
    )  # fmt: skip
    return out
