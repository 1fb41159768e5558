"""Lookup of the item of a row in plain torch operations: the specification.

`values` is an item table, int64 `[items, 3 + columns]`: `(t, h, w, *columns)`, zeros in padding items.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowItems(NamedTuple):
    """Item of each row.

    Attributes:
        item: Index of the item, int64 `[rows]`; a valid but arbitrary index in padding.
        within: Index of the row in its item, int64 `[rows]`; 0 in padding.
        active: True if the row belongs to an item, bool `[rows]`.
    """

    item: Tensor
    within: Tensor
    active: Tensor


class Coordinates(NamedTuple):
    """Position of each row in the grid of its item, and the size of that grid. All int64 `[rows]`.

    A padding row counts as the only row of a 1 x 1 grid: its positions are 0 and its sizes 1.

    Attributes:
        t: Index of the frame.
        h: Position in the frame, from the top.
        w: Position in the frame, from the left.
        row: Index in the item.
        height: Height of the frame.
        width: Width of the frame.
    """

    t: Tensor
    h: Tensor
    w: Tensor
    row: Tensor
    height: Tensor
    width: Tensor


def item_rows(values: Tensor) -> Tensor:
    """Return the rows of each item, int64 `[items]`; 0 in padding."""
    return values[:, 0] * values[:, 1] * values[:, 2]


def locate(values: Tensor, rows: int) -> RowItems:
    """Return the item of each of `rows` rows."""
    counts = item_rows(values)
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=values.device)
    item = torch.searchsorted(ends, row, right=True).clamp(max=values.shape[0] - 1)
    active = row < ends[-1:]
    return RowItems(item, torch.where(active, row - (ends - counts)[item], 0), active)


def coordinates(values: Tensor, rows: int, merge: int, side: int = 0) -> Coordinates:
    """Return the position of each of `rows` rows.

    Args:
        values: An item table, int64 `[items, 3 + columns]`.
        rows: Rows of the budget, padding included.
        merge: The rows of a frame are ordered in blocks of `merge * merge`; 1 is raster order.
        side: The blocks of a frame are ordered in windows of `side * side`, which are smaller at the right and the
            bottom edge; 0 means no windows.
    """
    item, within, active = locate(values, rows)
    height, width = (torch.where(active, values[item, size].clamp(min=1), 1) for size in (1, 2))
    frame = height * width
    t, place = within // frame, within % frame
    down, across = (height // merge).clamp(min=1), (width // merge).clamp(min=1)
    block, inner = place // (merge * merge), place % (merge * merge)
    y, x = _in_windows(block, down, across, side) if side else (block // across, block % across)
    h = y * merge + inner // merge
    w = x * merge + inner % merge
    return Coordinates(t, h, w, within, height, width)


def _in_windows(block: Tensor, down: Tensor, across: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return row and column of blocks in window order, in a frame of `down * across` blocks."""
    top = block // (across * side) * side
    block = block - top * across
    tall = (down - top).clamp(1, side)
    left = block // (tall * side) * side
    block = block - left * tall
    wide = (across - left).clamp(1, side)
    return top + block // wide, left + block % wide
