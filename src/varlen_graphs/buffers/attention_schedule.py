"""The schedule that the attention of all layers shares."""

from dataclasses import dataclass

from torch import nn

from varlen_graphs.attention.api import TileSchedule, tile_schedule
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.seqlens import check_queries
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.segments import Per


@dataclass(frozen=True)
class AttentionSchedule(Buffer):
    """A `TileSchedule` for `varlen_attention`, computed once a replay instead of once a layer.

    Attributes:
        heads: Query heads.
        head_dim: Channels a head.
        name: The argument it fills.
        per: What a segment is.
        queries: Of cross attention: how many queries belong to every segment of keys, as of `CuSeqlens(queries=...)`.
            `None`: the rows of a segment attend to each other.
    """

    any_segments = False
    for_rows = "packed"
    heads: int
    head_dim: int
    name: str = "schedule"
    per: Per = "item"
    queries: int | None = None

    def __post_init__(self) -> None:
        check_queries(self, self.queries, self.per)

    def produce(self, table: ItemTable, module: nn.Module) -> TileSchedule:
        """The schedule of the segments that `CuSeqlens(per=...)` describes."""
        budget, keys = table.budget, table.cu_seqlens(self.per)
        if self.queries is None:
            queries, longest, rows = keys, table.max_seqlen(self.per), budget.rows
        else:
            queries = table.query_seqlens(self.queries)
            longest, rows = self.queries, budget.items * self.queries
        return tile_schedule(queries, longest, rows=rows, heads=self.heads, head_dim=self.head_dim, cu_seqlens_k=keys)
