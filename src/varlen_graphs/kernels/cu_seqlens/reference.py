"""Where segments begin, in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import item_rows


def cu_seqlens(values: Tensor, segments: int, by_frame: bool, begins: int | None = None) -> Tensor:
    """Cumulative segment lengths: starts at 0, and the tail repeats the number of active rows.

    Args:
        values: An item table, int64 `[items, 3 + columns]`.
        segments: The capacity.
        by_frame: Whether a segment is a frame, or all rows of an item.
        begins: The column that says whether a segment begins with an item (1), or goes on with it (0); `None`: one does
            with every item.

    Returns:
        int32 `[segments + 1]`.
    """
    rows = item_rows(values)
    if by_frame:
        counts, lengths = values[:, 0], values[:, 1] * values[:, 2]
    else:
        starts = rows > 0 if begins is None else (rows > 0) & (values[:, begins] != 0)
        counts, lengths = starts.long(), rows
    ends, row_ends = counts.cumsum(0), rows.cumsum(0)
    slot = torch.arange(segments + 1, device=values.device)
    item = torch.searchsorted(ends, slot, right=True).clamp(max=values.shape[0] - 1)
    start = (row_ends - rows)[item] + (slot - (ends - counts)[item]) * lengths[item]
    return torch.where(slot < ends[-1:], start, row_ends[-1:]).int()
