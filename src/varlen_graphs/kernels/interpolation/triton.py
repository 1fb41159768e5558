"""Resampling of a square table to grids of any size in one launch."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS, grid_position, locate, triton_dtype
from varlen_graphs.kernels.launch import launch

TAPS = {"bilinear": 2, "bicubic": 4}
"""Taps per axis."""

TAP_ROWS = 16
"""Rows per program that writes taps."""

ROWS, COLUMNS = {"bilinear": 4, "bicubic": 2}, 128
"""Tile of a program that resamples. 128 columns divide the widths of most towers."""

PROGRAMS = 4096
"""Target number of programs: with more tiles, a program takes several of the same rows and reuses their taps."""


@triton.jit
def source(position, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """Return the table entry at or before a position, int32, and the distance from it, float32.

    Division is rounded as in torch, so that kernel and reference find the same entry.
    """
    p = position.to(tl.float32)
    if ALIGN_CORNERS:
        at = tl.div_rn(p * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    else:
        at = tl.div_rn((p + 0.5) * SIDE, size.to(tl.float32)) - 0.5
    floor = tl.floor(at)
    return floor.to(tl.int32), at - floor


@triton.jit
def tap(floor, STEP: tl.constexpr, SIDE: tl.constexpr, TAPS: tl.constexpr):
    """Return the entry of a tap on one axis."""
    return tl.minimum(tl.maximum(floor + (STEP + 1 - TAPS // 2), 0), SIDE - 1)


@triton.jit
def near(d):
    """Evaluate Keys' kernel (a = -0.75) at a distance of at most 1."""
    return (1.25 * d - 2.25) * d * d + 1


@triton.jit
def far(d):
    """Evaluate Keys' kernel (a = -0.75) at a distance from 1 to 2."""
    return ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0


@triton.jit
def weight(f, STEP: tl.constexpr, TAPS: tl.constexpr):
    """Return the weight of a tap on one axis for a position `f` after the entry at or before it."""
    if TAPS == 2:
        return f if STEP == 1 else 1 - f
    elif STEP == 0:
        return far(f + 1)
    elif STEP == 1:
        return near(f)
    elif STEP == 2:
        return near(1 - f)
    else:
        return far(2 - f)


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows"])
def interpolation_taps_kernel(
    indices, weights, values, item_stride, column_stride, items, rows, SIDE: tl.constexpr, TAPS: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write `indices`, int64, and `weights`, float32, both `[rows, TAPS * TAPS]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, height, width = locate(row, values, item_stride, column_stride, items)
    _, h, w = grid_position(within, height, width, MERGE)
    y, fy = source(h, height, SIDE, ALIGN_CORNERS)
    x, fx = source(w, width, SIDE, ALIGN_CORNERS)
    for i in tl.static_range(TAPS):
        for j in tl.static_range(TAPS):
            at = row.to(tl.int64) * (TAPS * TAPS) + (i * TAPS + j)
            tl.store(indices + at, tap(y, i, SIDE, TAPS) * SIDE + tap(x, j, SIDE, TAPS), row < rows)
            tl.store(weights + at, weight(fy, i, TAPS) * weight(fx, j, TAPS), row < rows)


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows", "tiles"])
def interpolate_kernel(
    out, entries, add, values, item_stride, column_stride, items, rows, tiles, DIM: tl.constexpr, SIDE: tl.constexpr,
    TAPS: tl.constexpr, ALIGN_CORNERS: tl.constexpr, MERGE: tl.constexpr, ACCUM: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Resample `entries` `[SIDE * SIDE, DIM]` into `out` `[rows, DIM]`; `add` `[rows, DIM]`. All contiguous.

    A program takes `tiles` tiles. The arithmetic is in `WIDE`; if `ACCUM` is narrower, every result is rounded to it,
    as operations in `ACCUM` would round it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, height, width = locate(row, values, item_stride, column_stride, items)
    _, h, w = grid_position(within, height, width, MERGE)
    y, fy = source(h, height, SIDE, ALIGN_CORNERS)
    x, fx = source(w, width, SIDE, ALIGN_CORNERS)

    first = tl.program_id(1) * tiles
    for tile in range(first, tl.minimum(first + tiles, tl.cdiv(DIM, COLUMNS))):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < DIM)[None, :]
        total = tl.zeros([ROWS, COLUMNS], WIDE)
        for i in tl.static_range(TAPS):
            for j in tl.static_range(TAPS):
                entry = (tap(y, i, SIDE, TAPS) * SIDE + tap(x, j, SIDE, TAPS)).to(tl.int64)
                b_weight = (weight(fy, i, TAPS) * weight(fx, j, TAPS)).to(ACCUM).to(WIDE)
                b_entry = tl.load(entries + entry[:, None] * DIM + column[None, :], inside, 0).to(ACCUM).to(WIDE)
                total = (total + (b_entry * b_weight[:, None]).to(ACCUM).to(WIDE)).to(ACCUM).to(WIDE)
        at = row.to(tl.int64)[:, None] * DIM + column[None, :]
        mask = (row < rows)[:, None] & inside
        if add is not None:
            total = tl.load(add + at, mask, 0).to(WIDE) + total.to(entries.dtype.element_ty).to(WIDE)
        tl.store(out + at, total.to(out.dtype.element_ty), mask)


def interpolation_taps(
    values: Tensor, rows: int, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[Tensor, Tensor]:
    """Compute `reference.interpolation_taps` in one launch."""
    shape = (rows, TAPS[mode] ** 2)
    indices = torch.empty(shape, dtype=torch.int64, device=values.device)
    weights = torch.empty(shape, dtype=torch.float32, device=values.device)
    launch(interpolation_taps_kernel, (triton.cdiv(rows, TAP_ROWS),),
        indices, weights, values, *values.stride(), values.shape[0], rows, SIDE=side, TAPS=TAPS[mode],
        ALIGN_CORNERS=align_corners, MERGE=merge, ROWS=TAP_ROWS, **OPTIONS,
    )  # fmt: skip
    return indices, weights


def interpolate(
    entries: Tensor, values: Tensor, rows: int, mode: str, align_corners: bool, merge: int, accum_dtype: torch.dtype,
    add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `reference.interpolate` in one launch."""
    dtype = entries.dtype if add is None else torch.promote_types(entries.dtype, add.dtype)
    out = torch.empty(rows, entries.shape[1], dtype=dtype, device=entries.device)
    row_blocks, column_blocks = triton.cdiv(rows, ROWS[mode]), triton.cdiv(entries.shape[1], COLUMNS)
    wide = torch.float64 if torch.float64 in (dtype, accum_dtype) else torch.float32
    tiles = min(max(row_blocks * column_blocks // PROGRAMS, 1), column_blocks)
    launch(interpolate_kernel, (row_blocks, triton.cdiv(column_blocks, tiles)),
        out, entries.contiguous(), None if add is None else add.contiguous(), values, *values.stride(), values.shape[0],
        rows, tiles, DIM=entries.shape[1], SIDE=math.isqrt(entries.shape[0]), TAPS=TAPS[mode],
        ALIGN_CORNERS=align_corners, MERGE=merge, ACCUM=triton_dtype(accum_dtype), WIDE=triton_dtype(wide),
        ROWS=ROWS[mode], COLUMNS=COLUMNS, **OPTIONS,
    )  # fmt: skip
    return out
