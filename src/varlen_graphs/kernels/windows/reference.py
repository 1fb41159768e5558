"""Boundaries and order of windows in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates, item_rows


def cu_window_seqlens(values: Tensor, segments: int, side: int) -> Tensor:
    """Return the cumulative lengths of windows of `side * side` rows, int32 `[segments + 1]`, for rows in window order.

    Starts at 0, and the tail repeats the number of active rows.
    """
    h, w = values[:, 1], values[:, 2]
    across = (w + side - 1) // side
    per_frame = (h + side - 1) // side * across
    counts, rows = values[:, 0] * per_frame, item_rows(values)
    ends, row_ends = counts.cumsum(0), rows.cumsum(0)
    slot = torch.arange(segments + 1, device=values.device)
    item = torch.searchsorted(ends, slot, right=True).clamp(max=values.shape[0] - 1)
    h, w, across, per_frame = h[item], w[item], across[item].clamp(min=1), per_frame[item].clamp(min=1)
    window = slot - (ends - counts)[item]
    frame, window = window // per_frame, window % per_frame
    top, left = window // across * side, window % across * side
    start = (row_ends - rows)[item] + frame * h * w + top * w + left * (h - top).clamp(max=side)
    return torch.where(slot < ends[-1:], start, row_ends[-1:]).int()


def window_index(values: Tensor, tokens: int, merge: int, side: int, inverse: bool) -> Tensor:
    """Return the merged token at each position of window order, or the inverse permutation; padding stays in place.

    int64 `[tokens]`; `tokens` are those of the budget, padding included. A window has `side * side` tokens.
    """
    unit = merge * merge
    place = coordinates(values, tokens * unit, merge, 0 if inverse else side)
    t, h, w, row, height, width = (size[::unit] for size in place)
    token = torch.arange(tokens, device=values.device)
    y, x = h // merge, w // merge
    down, across = (height // merge).clamp(min=1), (width // merge).clamp(min=1)
    if inverse:
        top, left = y // side * side, x // side * side
        tall, wide = (down - top).clamp(max=side), (across - left).clamp(max=side)
        in_frame = top * across + left * tall + (y - top) * wide + (x - left)
    else:
        in_frame = y * across + x
    return (token - row // unit + t * down * across + in_frame).clamp(0, tokens - 1)
