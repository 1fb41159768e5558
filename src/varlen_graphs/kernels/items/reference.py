"""Lookup of the item of a row in plain torch operations: the specification."""

from typing import NamedTuple

import torch
from torch import Tensor


class RowItems(NamedTuple):
    """Item of each row, index of the row in its item (0 in padding), and a mask of active rows, `[rows]` each."""

    item: Tensor  # a valid but arbitrary index in padding
    within: Tensor
    active: Tensor


class Coordinates(NamedTuple):
    """Position of each row in the grid of its item, and the size of that grid. All int64 `[rows]`.

    A padding row counts as the only row of a 1 x 1 grid: its positions are 0 and its sizes 1.
    """

    t: Tensor
    h: Tensor
    w: Tensor
    row: Tensor  # index in the item
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
    return locate_between(ends - counts, ends, row, row < ends[-1:])


def locate_between(starts: Tensor, ends: Tensor, row: Tensor, active: Tensor) -> RowItems:
    """Return the item of each `row`, all in order, where items begin at `starts` and end before `ends`."""
    item = torch.searchsorted(ends, row, right=True).clamp(max=ends.shape[0] - 1)
    return RowItems(item, torch.where(active, row - starts[item], 0), active)


def coordinates(values: Tensor, rows: int, merge: int, side: int = 0) -> Coordinates:
    """Return the position of each of `rows` rows.

    If `side` is not 0, the blocks of a frame are ordered in windows of `side * side`, which are smaller at the right
    and the bottom edge.
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
