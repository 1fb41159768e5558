"""Compile-time parameters of the kernel by head dimension and size, fixed at capture."""

from typing import NamedTuple

import torch

from varlen_graphs.attention.device import capability

HEAD_DIMS = range(64, 129, 8)
"""Head dimensions of the kernel."""

LONG = 1000
"""Keys from which a segment is long: shorter ones are faster with the tiles of 64 rows of `attention.kernel`."""

TIMES = {64: (0.75, 1.02, 1.21), 80: (0.9, 1.05, 1.34), 96: (0.85, 1.11, 1.36)}
"""Times of one, two and three warpgroups with rows of a tile of 192 over that of a tile of 128, on an H200, by largest
head dimension; one of a tile of 128 takes about as long."""

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM): tiles that run at a time."""


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
        """Registers per thread of warpgroups that compute, and of the one that copies; a program has 64 Ki."""
        return {2: (240, 24), 3: (160, 32)}[self.groups]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory; 1,024 of them align the rest."""
        matrices = -(-2 * (self.head_dim + self.ahead) // self.swizzle)
        return 1024 + matrices * self.swizzle * (64 * self.groups + 2 * self.stages * self.keys)


def runs_on(device: torch.device, head_dim: int, longest: int) -> bool:
    """Return True if the kernel is made for a device, a head dimension, and segments of up to `longest` rows."""
    fits = device.type == "cuda" and head_dim in HEAD_DIMS and longest >= LONG
    return fits and capability(device) == (9, 0)


def most_tile_rows(head_dim: int) -> int:
    """Return the most query rows per tile for which there are enough registers."""
    return 128 if head_dim > 96 else 192


def tile_rows(head_dim: int, heads: int, rows: int, longest: int) -> int:
    """Return the query rows per tile, 128 or 192, for segments of up to `longest` rows."""
    if most_tile_rows(head_dim) == 128:
        return 128
    one, two, three = next(times for most, times in TIMES.items() if head_dim <= most)
    longest = max(1, min(longest, rows))

    def time(tile: int, whole: float) -> float:
        tiles, groups = -(-longest // tile) * (rows // longest) * heads, tile // 64
        rounds, left = divmod(tiles, MULTIPROCESSORS)
        if left * groups <= MULTIPROCESSORS:  # these are shared out: see kernel.cu
            return rounds * whole + (one if left else 0)
        return rounds * whole + (two if 2 * left <= MULTIPROCESSORS else whole)

    return 192 if time(192, three) < time(128, 1) else 128


def parameters(head_dim: int, block: int, dtype: torch.dtype, ahead: int) -> Parameters:
    """Return the parameters for tiles of `block` query rows; measured on an H200 in bfloat16."""
    keys = 176 if head_dim > 96 else 112 if head_dim > 64 and block == 192 else 128
    swizzle = 64 if 64 < head_dim <= 96 else 128
    return Parameters(head_dim, ahead, keys, block // 64, swizzle, dtype == torch.bfloat16)
