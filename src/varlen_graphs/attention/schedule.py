"""Tile schedule of an attention, and the one of its long segments, which layers share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlen_graphs.attention.hopper import config as hopper
from varlen_graphs.attention.kernel.config import tile_rows
from varlen_graphs.attention.tile_schedule import op


@dataclass(frozen=True)
class TileSchedule:
    """Assignment of tiles of query rows to segments, computed once per forward and used by all layers.

    Attributes:
        tiles: int32 `[1 + tiles, 5]`; see `varlen_graphs.attention.tile_schedule.reference`.
        block: Query rows per tile.
        long_tiles: The same with more rows per tile, for the kernel of long segments; `None` where it is not used.
        long_block: Query rows per tile of `long_tiles`, or 0.
        rows: Query rows, padding included.
        cu_seqlens: Segments of the queries that it was computed from, int32 `[segments + 1]`.
        cu_seqlens_k: Segments of the keys that it was computed from, int32 `[segments + 1]`.
    """

    tiles: Tensor
    block: int
    long_tiles: Tensor | None
    long_block: int
    rows: int
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor


def tiles_of(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, rows: int, heads: int, head_dim: int, longest: int
) -> tuple[Tensor, int]:
    """Return the tile schedule of all segments, and its query rows per tile."""
    # A choice by size would make torch.compile guard on it, and recompile at every number of rows where it changes.
    block = 64 if torch.compiler.is_compiling() else tile_rows(head_dim, heads, rows, longest)
    return op.tile_schedule(cu_seqlens, cu_seqlens_k, rows, block, hopper.long_keys(head_dim)), block


def long_tiles_of(cu_seqlens: Tensor, rows: int, heads: int, head_dim: int, longest: int) -> tuple[Tensor, int]:
    """Return the schedule for the kernel of long segments, of self-attention, and its query rows per tile."""
    block = hopper.tile_rows(head_dim, heads, rows, longest)
    return op.tile_schedule(cu_seqlens, cu_seqlens, rows, block, hopper.long_keys(head_dim)), block
