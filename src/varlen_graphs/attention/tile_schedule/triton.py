"""Tile schedule as one small Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.attention.tile_schedule.reference import tile_bound
from varlen_graphs.kernels.launch import launch

SEGMENTS = 16
"""Segments per program."""


@triton.jit
def _tiles(start, stop, rows, BLOCK: tl.constexpr):
    """Count the tiles of a segment, cut to existing rows whatever its boundaries are."""
    return tl.cdiv(tl.maximum(tl.minimum(stop, rows) - tl.maximum(start, 0), 0), BLOCK)


@triton.jit(do_not_specialize=["segments", "rows"])  # sizes differ between calls: one kernel for all
def _schedule(
    cu_q, cu_k, tiles, segments, rows, BLOCK: tl.constexpr, LONG: tl.constexpr, SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the tiles of `SEGMENTS` segments; each program derives its first tile from all lengths by itself."""
    own = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    here = own <= segments  # the last one holds the rows that belong to no segment
    start = tl.maximum(tl.load(cu_q + own, mask=here, other=0), 0)
    stop = tl.minimum(tl.load(cu_q + own + 1, mask=own < segments, other=rows), rows)
    start_k = tl.maximum(tl.load(cu_k + own, mask=here, other=0), 0)
    stop_k = tl.maximum(tl.load(cu_k + own + 1, mask=own < segments, other=0), start_k)
    stop_k = tl.where(own < segments, stop_k, start_k)
    length = tl.where(own < segments, stop_k - start_k, -1)
    count = tl.where(here, _tiles(start, stop, rows, BLOCK), 0)

    first = tl.zeros([SEGMENTS], tl.int32)
    total = _tiles(tl.load(cu_q + segments), rows, rows, BLOCK)
    in_long = 0 * total
    for chunk in range(0, segments, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        there = other < segments
        starts_k = tl.maximum(tl.load(cu_k + other, mask=there, other=0), 0)
        lengths = tl.maximum(tl.load(cu_k + other + 1, mask=there, other=0), starts_k) - starts_k
        starts = tl.load(cu_q + other, mask=there, other=0)
        counts = _tiles(starts, tl.load(cu_q + other + 1, mask=there, other=0), rows, BLOCK)
        before = (lengths[None, :] > length[:, None]) | (
            (lengths[None, :] == length[:, None]) & (other[None, :] < own[:, None])
        )
        first += tl.sum(tl.where(before, counts[None, :], 0), 1)
        total += tl.sum(counts, 0)
        in_long += tl.sum(tl.where(lengths >= LONG, counts, 0), 0)
    bound = tl.cdiv(rows, BLOCK) + segments  # only boundaries that do not ascend have more
    total = tl.minimum(total, bound)
    if tl.program_id(0) == 0:
        column = tl.arange(0, 8)
        numbers = tl.where(column == 0, total, tl.where(column == 1, tl.minimum(in_long, total), 0))
        tl.store(tiles + column, numbers, mask=column < 5)
    for at in range(0, tl.max(count, 0), TILES):
        index = at + tl.arange(0, TILES)
        entry = tiles + 5 + (first[:, None] + index[None, :]) * 5
        mine = index[None, :] < tl.minimum(count, bound - first)[:, None]
        tl.store(entry, start[:, None] + 0 * index[None, :], mask=mine)
        tl.store(entry + 1, stop[:, None] + 0 * index[None, :], mask=mine)
        tl.store(entry + 2, start_k[:, None] + 0 * index[None, :], mask=mine)
        tl.store(entry + 3, stop_k[:, None] + 0 * index[None, :], mask=mine)
        tl.store(entry + 4, first[:, None] + 0 * index[None, :], mask=mine)


def tile_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int, long: int) -> Tensor:
    """Compute `reference.tile_schedule` in one launch."""
    segments = cu_seqlens_q.shape[0] - 1
    tiles = torch.empty((1 + tile_bound(rows, segments, block), 5), dtype=torch.int32, device=cu_seqlens_q.device)
    launch(_schedule, (triton.cdiv(segments + 1, SEGMENTS),),
        cu_seqlens_q, cu_seqlens_k, tiles, segments, rows, BLOCK=block, LONG=long, SEGMENTS=SEGMENTS, CHUNK=128,
        TILES=64,
    )  # fmt: skip
    return tiles
