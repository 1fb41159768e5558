"""Boundaries of segments in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import ITEMS, OPTIONS, read_items, to_int32
from varlen_graphs.kernels.launch import launch

SLOTS = 16
"""Entries of the result per program."""


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "segments", "begins"])
def cu_seqlens_kernel(
    out, values, item_stride, column_stride, items, segments, begins, BY_FRAME: tl.constexpr, GROUPED: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Write `out`, int32 `[segments + 1]`."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    start = tl.zeros_like(slot)
    total = tl.full([], 0, tl.int64)
    total_rows = tl.full([], 0, tl.int64)
    for first in range(0, items, ITEMS):
        t, h, w = read_items(values, item_stride, column_stride, items, first)
        rows = t * h * w
        item = first + tl.arange(0, ITEMS)
        counts = t if BY_FRAME else (item < items).to(tl.int64)
        if GROUPED:
            begin = tl.load(values + item * item_stride + begins * column_stride, item < items, 0)
            counts = tl.where(begin != 0, counts, 0)
        ends = total + tl.cumsum(counts, 0)
        row_starts = total_rows + tl.cumsum(rows, 0) - rows
        before = slot[:, None] - to_int32(ends - counts)[None, :]  # earlier segments of the same item
        own = (before >= 0) & (slot[:, None] < to_int32(ends)[None, :])
        starts = to_int32(row_starts)[None, :] + before * to_int32(h * w)[None, :]
        start += tl.sum(tl.where(own, starts, 0), 1)
        total += tl.sum(counts, 0)
        total_rows += tl.sum(rows, 0)
    tl.store(out + slot, tl.where(slot < total, start, total_rows.to(tl.int32)), slot <= segments)


def cu_seqlens(values: Tensor, segments: int, by_frame: bool, begins: int | None = None) -> Tensor:
    """Compute `reference.cu_seqlens` in one launch."""
    out = torch.empty(segments + 1, dtype=torch.int32, device=values.device)
    launch(cu_seqlens_kernel, (triton.cdiv(segments + 1, SLOTS),),
        out, values, *values.stride(), values.shape[0], segments, begins or 0, BY_FRAME=by_frame,
        GROUPED=begins is not None, SLOTS=SLOTS, **OPTIONS,
    )  # fmt: skip
    return out
