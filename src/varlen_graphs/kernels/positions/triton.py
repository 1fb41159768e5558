"""Positions of rows in their items in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS, coordinate, grid_position, locate
from varlen_graphs.kernels.launch import launch

ROWS = 16
"""Rows per program."""


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows"])
def positions_kernel(
    out, values, item_stride, column_stride, items, rows, AXES: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr
):
    """Write `out`, int64 `[rows, axes]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, height, width = locate(row, values, item_stride, column_stride, items)
    t, h, w = grid_position(within, height, width, MERGE)
    for axis in tl.static_range(len(AXES)):
        tl.store(out + row.to(tl.int64) * len(AXES) + axis, coordinate(AXES, axis, t, h, w, within), row < rows)


def positions(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    """Compute `reference.positions` in one launch."""
    names = tuple(axes.split())
    out = torch.empty(rows, len(names), dtype=torch.int64, device=values.device)
    launch(positions_kernel, (triton.cdiv(rows, ROWS),),
        out, values, *values.stride(), values.shape[0], rows, AXES=names, MERGE=merge, ROWS=ROWS, **OPTIONS,
    )  # fmt: skip
    return out
