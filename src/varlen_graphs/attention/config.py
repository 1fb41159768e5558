"""How the attention kernel is run, by head dimension and size: chosen once, at capture."""

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """One way to run the kernel.

    Attributes:
        keys: Keys a block.
        warps: Warps a program.
        stages: How many blocks of keys are on their way at a time.
        programs: Programs a multiprocessor.
    """

    keys: int
    warps: int
    stages: int
    programs: int


# Head dimensions up to the first number, by the query rows of a tile. Measured on an H200 in bfloat16. Blocks of 128
# keys only where no product is over 16 channels (see `split`): Triton 3.6 takes wrong columns of a tile of [128, 16].
_TABLE: list[tuple[int, dict[int, Config]]] = [
    (16, {64: Config(64, 4, 3, 3), 128: Config(64, 4, 3, 2)}),
    (32, {64: Config(128, 4, 3, 3), 128: Config(64, 4, 3, 2)}),
    (48, {64: Config(64, 4, 3, 3), 128: Config(64, 4, 3, 2)}),
    (64, {64: Config(128, 4, 3, 2), 128: Config(64, 4, 3, 2)}),
    (80, {64: Config(64, 4, 3, 3), 128: Config(64, 4, 3, 2)}),
    (96, {64: Config(64, 4, 2, 3), 128: Config(64, 4, 3, 2)}),
    (128, {64: Config(64, 4, 3, 2), 128: Config(128, 8, 3, 1)}),
    (256, {64: Config(32, 4, 2, 1), 128: Config(32, 8, 2, 1)}),
]

_FLOAT32 = [
    (128, {64: Config(32, 4, 2, 1), 128: Config(32, 8, 2, 1)}),
    (256, {64: Config(16, 4, 2, 1), 128: Config(16, 8, 2, 1)}),
]

LARGE_TILES = 200
"""Tiles of 128 rows there must be at head dimensions of 81 to 96: fewer leave multiprocessors without work."""

ROUND = {64: 64 * 3 * 132, 128: 128 * 2 * 132}
"""Query rows times heads of at most 80 channels that an H200 works on at once, by the rows of a tile."""

MAX_HEAD_DIM = 256


def tile_rows(head_dim: int, heads: int, rows: int, longest: int) -> int:
    """Query rows a tile: tiles of 128 load keys less often, tiles of 64 keep more loads on their way.

    On an H200, in half precision, the latter are faster, except at head dimensions of 81 to 96 in large calls, and at
    65 to 80 for one long segment that takes tiles of 64 a second round, and tiles of 128 only one.

    Args:
        head_dim: Channels a head.
        heads: Query heads.
        rows: Query rows, padding included.
        longest: At least the rows of the longest segment.
    """
    work = rows * heads
    if 64 < head_dim <= 80:
        large = ROUND[64] < work <= ROUND[128] and 2 * longest > rows
    else:
        large = 80 < head_dim <= 96 and work >= 128 * LARGE_TILES
    return 128 if large and longest > 64 else 64


def configuration(head_dim: int, block: int, dtype: torch.dtype) -> Config:
    """How to run tiles of `block` query rows."""
    table = _FLOAT32 if dtype == torch.float32 else _TABLE
    return next(configs[block] for most, configs in table if head_dim <= most)


def split(head_dim: int) -> tuple[int, int]:
    """A head dimension as a power of two and a smaller one, or none: 72 as 64 + 16, 112 as 128 + 0.

    Matrix units take powers of two from 16 on; two products of 64 and 16 beat one of 128.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    if whole == head_dim or whole == 16:
        return whole, 0
    rest = max(16, 1 << (head_dim - whole // 2 - 1).bit_length())
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)
