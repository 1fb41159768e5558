"""Cumulative segment lengths."""

from dataclasses import dataclass

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per


@dataclass(frozen=True)
class CuSeqlens(Buffer):
    """Cumulative segment lengths, int32 `[segments + 1]`: starts at 0, and the tail repeats the number of active rows.

    Attributes:
        name: Argument to fill.
        per: Kind of segment: `"frame"`, `"item"`, `"clip"` (all frames of an item attend to each other), `"group"`
            (all rows of a group of items), or `Windows(side)` for rows in the order of `WindowIndex`.
        queries: For cross attention with a fixed number of queries per segment: the buffer then holds cumulative query
            counts, `[0, queries, 2 * queries, ...]`, up to `items * queries`.

    Raises:
        SpecError: `queries` is below 1, `per` is no kind of segment, or one with possibly more segments than items.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "cu_seqlens"
    per: Per = "item"
    queries: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_queries(self, self.queries, self.per)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the cumulative lengths, int32 `[segments + 1]`."""
        return table.cu_seqlens(self.per) if self.queries is None else table.query_seqlens(self.queries)


def check_queries(declaration: object, queries: int | None, per: Per) -> None:
    """Check that every segment can have `queries` queries."""
    if queries is not None and (queries < 1 or per not in ("item", "clip", "group")):
        raise SpecError(f"{declaration!r}: expected queries of at least 1, with per='item', 'clip' or 'group'")
