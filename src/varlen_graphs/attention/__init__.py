"""Attention within segments of packed rows."""

from varlen_graphs.attention.api import TileSchedule, tile_schedule, varlen_attention

__all__ = ["TileSchedule", "tile_schedule", "varlen_attention"]
