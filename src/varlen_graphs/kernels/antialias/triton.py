"""Antialiased resampling of a square table in one launch.

Reads only entries with a weight: two per axis when upsampling, up to all of them when downsampling, and none for
padding rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS, find, grid_position, triton_dtype
from varlen_graphs.kernels.launch import launch

ROWS, COLUMNS = 4, 128
"""Tile of a program. 128 columns divide the widths of most towers."""


@triton.jit
def filter_span(position, size, SIDE: tl.constexpr):
    """Return the filter of a position on one axis.

    Centre and half width in entries, float32; first entry and end, int32.
    """
    size = size.to(tl.float32)
    centre = tl.div_rn((position.to(tl.float32) + 0.5) * SIDE, size)
    support = tl.maximum(tl.div_rn(tl.full([], SIDE, tl.float32), size), 1.0)
    first = tl.maximum(tl.floor(centre - support + 0.5), 0).to(tl.int32)
    end = tl.minimum(tl.floor(centre + support + 0.5), SIDE).to(tl.int32)
    return centre, support, first, end


@triton.jit
def weight(entry, centre, support, end):
    """Return the weight of an entry on one axis, before normalization."""
    distance = tl.abs(entry.to(tl.float32) + 0.5 - centre)
    return tl.where(entry < end, tl.maximum(1 - tl.div_rn(distance, support), 0), 0)


@triton.jit
def weight_sum(first, centre, support, end, taps):
    """Return the sum of the weights on one axis."""
    total = tl.zeros_like(centre)
    for i in range(taps):
        total += weight(first + i, centre, support, end)
    return total


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows"])
def antialias_kernel(
    out, entries, add, values, item_stride, column_stride, items, rows, DIM: tl.constexpr, SIDE: tl.constexpr,
    MERGE: tl.constexpr, ACCUM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Resample `entries` `[SIDE * SIDE, DIM]` into `out` `[rows, DIM]`; `add` `[rows, DIM]`. All contiguous.

    The arithmetic is in `WIDE`; if `ACCUM` is narrower, factors and sums are rounded to it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, height, width = find(row, values, item_stride, column_stride, items)
    active = (height > 0) & (width > 0)
    height, width = tl.maximum(height, 1), tl.maximum(width, 1)
    _, h, w = grid_position(within, height, width, MERGE)
    y_centre, y_support, y_first, y_end = filter_span(h, height, SIDE)
    x_centre, x_support, x_first, x_end = filter_span(w, width, SIDE)
    y_taps = tl.max(tl.where(active, y_end - y_first, 0), 0)
    x_taps = tl.max(tl.where(active, x_end - x_first, 0), 0)
    y_sum = tl.where(active, weight_sum(y_first, y_centre, y_support, y_end, y_taps), 1)
    x_sum = tl.where(active, weight_sum(x_first, x_centre, x_support, x_end, x_taps), 1)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for i in range(y_taps):
        y = tl.minimum(y_first + i, SIDE - 1)
        y_weight = tl.where(active, tl.div_rn(weight(y_first + i, y_centre, y_support, y_end), y_sum), 0)
        for j in range(x_taps):
            x = tl.minimum(x_first + j, SIDE - 1)
            x_weight = tl.div_rn(weight(x_first + j, x_centre, x_support, x_end), x_sum)
            entry = (y * SIDE + x).to(tl.int64)
            b_entry = tl.load(entries + entry[:, None] * DIM + column[None, :], inside, 0).to(ACCUM).to(WIDE)
            total += b_entry * (y_weight * x_weight).to(ACCUM).to(WIDE)[:, None]
    total = total.to(ACCUM).to(WIDE)
    at = row.to(tl.int64)[:, None] * DIM + column[None, :]
    mask = (row < rows)[:, None] & inside
    if add is not None:
        total = tl.load(add + at, mask, 0).to(WIDE) + total.to(entries.dtype.element_ty).to(WIDE)
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


def antialias(
    entries: Tensor, values: Tensor, rows: int, merge: int, accum_dtype: torch.dtype, add: Tensor | None = None
) -> Tensor:
    """Compute `reference.antialias` in one launch."""
    dtype = entries.dtype if add is None else torch.promote_types(entries.dtype, add.dtype)
    dim = entries.shape[1]
    out = torch.empty(rows, dim, dtype=dtype, device=entries.device)
    wide = torch.float64 if torch.float64 in (dtype, accum_dtype) else torch.float32
    launch(antialias_kernel, (triton.cdiv(rows, ROWS), triton.cdiv(dim, COLUMNS)),
        out, entries.contiguous(), None if add is None else add.contiguous(), values, *values.stride(), values.shape[0],
        rows, DIM=dim, SIDE=math.isqrt(entries.shape[0]), MERGE=merge, ACCUM=triton_dtype(accum_dtype),
        WIDE=triton_dtype(wide), ROWS=ROWS, COLUMNS=COLUMNS, **OPTIONS,
    )  # fmt: skip
    return out
