"""Cosines and sines of rotary position embedding in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS, coordinate, grid_position, locate
from varlen_graphs.kernels.launch import launch

ROWS = 4
"""Rows per program."""


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows"])
def rotary_table_kernel(
    cos, sin, inv_freq, values, item_stride, column_stride, items, rows, FREQUENCIES: tl.constexpr, AXES: tl.constexpr,
    MERGE: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write `cos` and `sin`, float32 `[rows, 2 * axes * FREQUENCIES]`; `inv_freq` is contiguous."""
    HALF: tl.constexpr = len(AXES) * FREQUENCIES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    within, height, width = locate(row, values, item_stride, column_stride, items)
    t, h, w = grid_position(within, height, width, MERGE, SIDE)

    position = tl.zeros([ROWS, COLUMNS], tl.int32)
    for axis in tl.static_range(len(AXES)):
        turns = column // FREQUENCIES == axis
        position = tl.where(turns[None, :], coordinate(AXES, axis, t, h, w, within)[:, None], position)
    frequency = tl.load(inv_freq + column % FREQUENCIES).to(tl.float32)
    angle = position.to(tl.float32) * frequency[None, :]
    b_cos, b_sin = tl.cos(angle), tl.sin(angle)

    at = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    mask = (row < rows)[:, None] & (column < HALF)[None, :]
    tl.store(cos + at, b_cos, mask)
    tl.store(cos + at + HALF, b_cos, mask)
    tl.store(sin + at, b_sin, mask)
    tl.store(sin + at + HALF, b_sin, mask)


def rotary_table(
    values: Tensor, rows: int, inv_freq: Tensor, axes: str, merge: int, side: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `reference.rotary_table` in one launch."""
    names = tuple(axes.split())
    half = len(names) * inv_freq.shape[0]
    cos, sin = (torch.empty(rows, 2 * half, dtype=torch.float32, device=values.device) for _ in range(2))
    launch(rotary_table_kernel, (triton.cdiv(rows, ROWS),),
        cos, sin, inv_freq.contiguous(), values, *values.stride(), values.shape[0], rows, FREQUENCIES=inv_freq.shape[0],
        AXES=names, MERGE=merge, SIDE=side, ROWS=ROWS, COLUMNS=triton.next_power_of_2(half), **OPTIONS,
    )  # fmt: skip
    return cos, sin
