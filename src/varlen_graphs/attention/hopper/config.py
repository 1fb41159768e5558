"""Compile-time parameters of the kernel by head dimension and size, fixed at capture."""

from functools import lru_cache
from typing import NamedTuple

import torch

from varlen_graphs.attention.device import capability

HEAD_DIMS = range(64, 129, 8)
"""Head dimensions of the kernel."""

LONG = {64: 192, 96: 320, 128: 480}
"""Keys from which a segment is long, up to a head dimension: `attention.kernel` takes the others (H200)."""

TIMES: dict[int, dict[int, tuple[float, ...]]] = {
    64: {128: (0.71, 1.0), 192: (0.72, 1.0, 1.22), 256: (0.86, 1.06, 1.31, 1.62)},
    80: {128: (0.77, 1.0), 192: (0.77, 0.99, 1.24)},
    96: {128: (0.75, 1.03), 192: (0.76, 1.0, 1.33)},
    128: {128: (0.72, 1.0)},
}
"""Tiles for up to a head dimension, by query rows: times where one, two, ... of the warpgroups have rows, over that of
a tile of 128 rows (7,056 keys, H200)."""

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM): tiles that run at a time."""

MANY_ROWS = 16 * 32_768
"""Query rows times heads from which on the last of the rounds no longer matters."""


class Parameters(NamedTuple):
    """Parameters that a kernel is compiled with."""

    head_dim: int
    ahead: int  # channels of a neighbouring head that are loaded with a head, 0 or 8: see kernel.cu
    keys: int  # per block
    groups: int  # warpgroups that compute, of 64 query rows each
    swizzle: int  # bytes per row of the matrices in shared memory that a head is split into
    bfloat16: bool

    @property
    def stages(self) -> int:
        """Blocks of keys, and as many of values, in shared memory."""
        return 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of warpgroups that compute, and of the one that copies.

        They share what all threads begin with: each as many, a multiple of 8, as 64 Ki allow.
        """
        return {2: (240, 24), 3: (160, 32), 4: (112, 24)}[self.groups]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory; 1,024 of them align the rest."""
        matrices = -(-2 * (self.head_dim + self.ahead) // self.swizzle)
        return 1024 + matrices * self.swizzle * (64 * self.groups + 2 * self.stages * self.keys)


def runs_on(device: torch.device, head_dim: int, longest: int) -> bool:
    """Return True if the kernel is made for a device, a head dimension, and segments of up to `longest` rows."""
    fits = device.type == "cuda" and head_dim in HEAD_DIMS and longest >= long_keys(head_dim)
    return fits and capability(device) == (9, 0)


def long_keys(head_dim: int) -> int:
    """Return the number of keys from which a segment is long."""
    return next((keys for most, keys in LONG.items() if head_dim <= most), LONG[HEAD_DIMS[-1]])


def times(head_dim: int) -> dict[int, tuple[float, ...]]:
    """Return the tiles that there are kernels for, by their query rows, and what they take: see `TIMES`."""
    return next(tiles for most, tiles in TIMES.items() if head_dim <= most)


def tile_rows(head_dim: int, heads: int, rows: int, longest: int) -> int:
    """Return the query rows per tile, 128, 192 or 256, for segments of up to `longest` rows."""
    longest = max(1, min(longest, rows))
    return _fastest(head_dim, heads, rows // longest, longest)


@lru_cache(maxsize=1024)  # forwards of the same size ask again
def _fastest(head_dim: int, heads: int, segments: int, length: int) -> int:
    tiles = times(head_dim)
    return min(tiles, key=lambda tile: _time(tiles[tile], tile, heads, segments, length))


def _time(costs: tuple[float, ...], tile: int, heads: int, segments: int, length: int) -> float:
    """Return the time of segments of one length, whose tiles are shared out as in kernel.cu."""
    full, short = divmod(length, tile)
    groups, last = tile // 64, -(-short // 64)  # warpgroups with rows of a full tile, and of a short one
    own = [costs[-1]] * (full * heads) + [costs[last - 1]] * (heads if last else 0)
    if segments * heads * length > MANY_ROWS:
        return segments * sum(own) / MULTIPROCESSORS
    pieces = own * segments
    rest = len(pieces) % MULTIPROCESSORS
    split = last if last and rest <= heads else groups
    parts = split if rest * split <= MULTIPROCESSORS else 2 if split > 2 and rest * 2 <= MULTIPROCESSORS else 1
    if parts > 1:
        sizes = [sum(group * parts // split == part for group in range(split)) for part in range(parts)]
        pieces[len(pieces) - rest :] = [costs[size - 1] for size in sizes] * rest
    busy = [0.0] * MULTIPROCESSORS
    pieces += [0.0] * (-len(pieces) % MULTIPROCESSORS)
    for start in range(0, len(pieces), MULTIPROCESSORS):
        busy = [before + more for before, more in zip(busy, pieces[start : start + MULTIPROCESSORS], strict=True)]
        busy.reverse()  # the next round goes back the way that this one came
    return max(busy)


def parameters(head_dim: int, block: int, dtype: torch.dtype, ahead: int) -> Parameters:
    """Return the parameters for tiles of `block` query rows; measured on an H200 in bfloat16."""
    keys = 176 if head_dim > 96 else {128: 128, 192: 112, 256: 64}[block]
    swizzle = 64 if 64 < head_dim <= 96 else 128
    return Parameters(head_dim, ahead, keys, block // 64, swizzle, dtype == torch.bfloat16)
