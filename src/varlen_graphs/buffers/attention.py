"""The schedule that the attention of all layers shares."""

from dataclasses import dataclass

from torch import nn

from varlen_graphs.attention import TileSchedule, tile_schedule
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.layout import Per
from varlen_graphs.table import ItemTable


@dataclass(frozen=True)
class AttentionSchedule(Buffer):
    """A `TileSchedule` for `varlen_attention`, computed once a replay instead of once a layer.

    Attributes:
        heads: Query heads.
        head_dim: Channels a head.
        name: The argument it fills.
        per: What a segment is.
    """

    any_segments = False
    for_rows = "packed"
    heads: int
    head_dim: int
    name: str = "schedule"
    per: Per = "item"

    def produce(self, table: ItemTable, module: nn.Module) -> TileSchedule:
        """The schedule of the segments that `CuSeqlens(per=...)` describes."""
        budget = table.budget
        return tile_schedule(
            table.cu_seqlens(self.per),
            table.max_seqlen(self.per),
            rows=budget.rows,
            heads=self.heads,
            head_dim=self.head_dim,
        )
