"""Where segments begin, in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import item_rows


def cu_seqlens(values: Tensor, segments: int, by_frame: bool) -> Tensor:
    """Cumulative segment lengths: starts at 0, and the tail repeats the number of active rows.

    Args:
        values: An item table, int64 `[items, 3 + columns]`.
        segments: The capacity.
        by_frame: Whether a segment is a frame, or all rows of an item.

    Returns:
        int32 `[segments + 1]`.
    """
    rows = item_rows(values)
    counts, lengths = (values[:, 0], values[:, 1] * values[:, 2]) if by_frame else ((rows > 0).long(), rows)
    ends, row_ends = counts.cumsum(0), rows.cumsum(0)
    slot = torch.arange(segments + 1, device=values.device)
    item = torch.searchsorted(ends, slot, right=True).clamp(max=values.shape[0] - 1)
    start = (row_ends - rows)[item] + (slot - (ends - counts)[item]) * lengths[item]
    return torch.where(slot < ends[-1:], start, row_ends[-1:]).int()
