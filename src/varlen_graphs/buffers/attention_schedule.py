"""Tile schedule that the attention of all layers shares."""

from dataclasses import dataclass

from torch import nn

from varlen_graphs.attention.api import TileSchedule, tile_schedule
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.cu_seqlens import check_queries
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per


@dataclass(frozen=True)
class AttentionSchedule(Buffer):
    """`TileSchedule` for `varlen_attention`, computed once per replay instead of once per layer.

    Attributes:
        heads: Number of query heads.
        head_dim: Number of channels per head.
        name: Argument to fill.
        per: Kind of segment, as in `CuSeqlens`.
        queries: For cross attention: number of queries per segment of keys, as in `CuSeqlens(queries=...)`. `None` for
            self-attention within each segment.

    Raises:
        SpecError: `heads`, `head_dim` or `queries` is below 1, `per` is no kind of segment, or one with possibly more
            segments than items.
    """

    any_segments = False
    for_rows = "packed"
    heads: int
    head_dim: int
    name: str = "schedule"
    per: Per = "item"
    queries: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "heads", "head_dim")
        check_queries(self, self.queries, self.per)

    def produce(self, table: ItemTable, module: nn.Module) -> TileSchedule:
        """Return the schedule of the segments of `CuSeqlens(per=...)`."""
        budget, keys = table.budget, table.cu_seqlens(self.per)
        if self.queries is None:
            queries, longest, rows = keys, table.max_seqlen(self.per), table.rows_with_prefix
        else:
            queries = table.query_seqlens(self.queries)
            longest, rows = self.queries, budget.items * self.queries
        return tile_schedule(queries, longest, rows=rows, heads=self.heads, head_dim=self.head_dim, cu_seqlens_k=keys)
