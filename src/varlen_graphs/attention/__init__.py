"""Attention within segments."""

from varlen_graphs.attention.api import TileSchedule, tile_schedule, varlen_attention

__all__ = [
    "TileSchedule",
    "tile_schedule",
    "varlen_attention",
]
