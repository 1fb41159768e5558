"""Boundaries of segments in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import item_rows


def cu_seqlens(values: Tensor, segments: int, by_frame: bool, begins: int | None = None) -> Tensor:
    """Return the cumulative segment lengths, int32 `[segments + 1]`; the tail repeats the number of active rows.

    If `by_frame` is set, a segment is a frame, otherwise an item. `begins` is the index of a column that is 0 if an
    item continues the segment of the previous item, and 1 otherwise.
    """
    rows = item_rows(values)
    if by_frame:
        counts, lengths = values[:, 0], values[:, 1] * values[:, 2]
    else:  # an item without rows is an empty segment, and so is one of padding, at the end
        counts = torch.ones_like(rows) if begins is None else (values[:, begins] != 0).long()
        lengths = rows
    ends, row_ends = counts.cumsum(0), rows.cumsum(0)
    slot = torch.arange(segments + 1, device=values.device)
    item = torch.searchsorted(ends, slot, right=True).clamp(max=values.shape[0] - 1)
    start = (row_ends - rows)[item] + (slot - (ends - counts)[item]) * lengths[item]
    return torch.where(slot < ends[-1:], start, row_ends[-1:]).int()
