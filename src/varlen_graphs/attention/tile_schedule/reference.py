"""Tile schedule in plain torch operations: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def tile_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int, long: int) -> Tensor:
    """Assign each tile of `block` query rows to a part of a segment, for a grid that does not know the segments.

    Segments with the most keys come first, so that the last tiles to finish are short ones. Rows that belong to no
    segment come last, as one segment without keys.

    Args:
        cu_seqlens_q: int32 `[segments + 1]`, contiguous. Boundaries outside `0..rows` are clamped.
        cu_seqlens_k: int32 `[segments + 1]`, contiguous. Boundaries below 0 are clamped, lengths too.
        rows: Query rows, padding included.
        block: Query rows per tile.
        long: Number of keys, at least 1, from which a segment is long.

    Returns:
        int32 `[1 + tiles, 5]`, where `tiles` is the upper bound `tile_bound(...)`. Entry 0 holds the number of tiles,
        and how many of them, the first ones, belong to long segments. Every other entry describes the segment of its
        tile: first query row, end of the query rows, first key row, end of the key rows, and index of the segment's
        first tile. Entries past the number of tiles are arbitrary.
    """
    cu_seqlens_q, end = cu_seqlens_q.clamp(0, rows), cu_seqlens_q.new_full((1,), rows)
    cu_seqlens_k = cu_seqlens_k.clamp(min=0)
    keys = cu_seqlens_k.diff().clamp(min=0)
    order = torch.argsort(keys, descending=True, stable=True)
    order = torch.cat([order, order.new_full((1,), cu_seqlens_q.shape[0] - 1)])
    start, stop = (torch.cat([cu_seqlens_q, end])[order + shift] for shift in (0, 1))
    start_k = cu_seqlens_k[order]
    stop_k = start_k + F.pad(keys, (0, 1))[order]
    counts = (stop - start + block - 1) // block
    ends = counts.cumsum(0)
    tile = torch.arange(tile_bound(rows, cu_seqlens_q.shape[0] - 1, block), device=cu_seqlens_q.device)
    at = torch.searchsorted(ends, tile, right=True).clamp(max=order.shape[0] - 1)
    numbers = torch.stack([ends[-1], (counts * (stop_k - start_k >= long)).sum()])
    tiles = torch.stack([start[at], stop[at], start_k[at], stop_k[at], (ends - counts)[at]], 1)
    return torch.cat([F.pad(numbers, (0, 3))[None], tiles]).int()


def tile_bound(rows: int, segments: int, block: int) -> int:
    """Return the maximum number of tiles, including those of rows that belong to no segment."""
    return -(-rows // block) + segments
