"""Attention within the long segments of a schedule, in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.attention.kernel import reference


def attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, block: int, scale: float) -> Tensor:
    """Compute softmax attention of the rows of long segments over the keys of their segment; other rows are zero.

    Args:
        q: Queries, `[rows, heads, head_dim]`.
        k: Keys, `[rows, heads_k, head_dim]`; `heads_k` divides `heads`.
        v: Values, `[rows, heads_k, head_dim]`.
        tiles: Tile schedule, int32 `[1 + tiles, 5]`: see `varlen_graphs.attention.tile_schedule.reference`.
        block: Query rows per tile of the schedule.
        scale: Factor on the scores.

    Returns:
        `[rows, heads, head_dim]` in the dtype of `q`. Syncs with the device.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    count, *entries = tiles.tolist()
    for start, stop, start_k, stop_k, _ in dict.fromkeys(map(tuple, entries[: count[1]])):
        bounds, bounds_k = (tiles.new_tensor([0, rows]) for rows in (stop - start, stop_k - start_k))
        keys, values = k[start_k:stop_k], v[start_k:stop_k]
        out[start:stop] = reference.by_segment(q[start:stop], keys, values, bounds, bounds_k, scale, -1, -1)
    return out
