"""Launch configuration of the attention kernel by head dimension and size, fixed at capture."""

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Launch parameters of the kernel."""

    keys: int  # per block
    warps: int  # per program
    stages: int  # blocks of keys in flight at a time
    programs: int  # per multiprocessor


# One entry per range of head dimensions, up to and including the first number, by query rows per tile. Measured on an
# H200 in bfloat16. Blocks of 128 keys only where no product has 16 channels (see `split`): Triton 3.6 reads wrong
# columns of a [128, 16] tile.
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
"""Minimum number of 128-row tiles at head dimensions 81 to 96: fewer leave multiprocessors without work."""

ROUND = {64: 64 * 3 * 132, 128: 128 * 2 * 132}
"""Query rows times heads that an H200 processes at once, for heads of at most 80 channels, by rows per tile."""

MAX_HEAD_DIM = 256
"""Largest head dimension of the kernel."""


def tile_rows(head_dim: int, heads: int, rows: int, longest: int) -> int:
    """Return the query rows per tile, 64 or 128, for `rows` query rows and segments of up to `longest` rows."""
    # Tiles of 128 load keys less often, tiles of 64 keep more loads in flight. On an H200, in half precision, 64 is
    # faster, with two exceptions: large calls at head dimensions 81 to 96, and, at head dimensions 65 to 80, one long
    # segment that needs two rounds of 64-row tiles but only one round of 128-row tiles.
    work = rows * heads
    if 64 < head_dim <= 80:
        large = ROUND[64] < work <= ROUND[128] and 2 * longest > rows
    else:
        large = 80 < head_dim <= 96 and work >= 128 * LARGE_TILES
    return 128 if large and longest > 64 else 64


def configuration(head_dim: int, block: int, dtype: torch.dtype, biased: bool) -> Config:
    """Return the launch parameters for tiles of `block` query rows."""
    table = _FLOAT32 if dtype == torch.float32 else _TABLE
    config = next(configs[block] for most, configs in table if head_dim <= most)
    # Biases take shared memory, of which blocks of 128 keys in tiles of 128 rows leave too little for three stages.
    return config._replace(stages=2) if biased and config.keys == block == 128 else config


def split(head_dim: int) -> tuple[int, int]:
    """Split a head dimension into a power of two and a smaller one, or 0: 72 is 64 + 16, 112 is 128 + 0."""
    # Matrix units take powers of two of at least 16; two products of 64 and 16 channels are faster than one of 128.
    whole = max(16, 1 << (head_dim - 1).bit_length())
    if whole == head_dim or whole == 16:
        return whole, 0
    rest = max(16, 1 << (head_dim - whole // 2 - 1).bit_length())
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)
