"""Where segments begin, and how long the longest is."""

from dataclasses import dataclass

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.errors import SpecError
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.segments import Per


@dataclass(frozen=True)
class CuSeqlens(Buffer):
    """Cumulative segment lengths, int32 `[segments + 1]`: starts at 0, and the tail repeats the number of active rows.

    Attributes:
        name: The argument it fills.
        per: What a segment is: `"frame"`, `"item"`, `"clip"` (all frames of an item attend to each other), `"group"`
            (all rows of a group of items), or `Windows(side)` of rows that `WindowIndex` brought into their order.
        queries: Of cross attention in which as many queries belong to every segment: where these begin,
            `[0, queries, 2 * queries, ...]`, up to `items * queries` rows of queries.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "cu_seqlens"
    per: Per = "item"
    queries: int | None = None

    def __post_init__(self) -> None:
        check_queries(self, self.queries, self.per)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int32 `[segments + 1]`."""
        return table.cu_seqlens(self.per) if self.queries is None else table.query_seqlens(self.queries)


def check_queries(declaration: object, queries: int | None, per: Per) -> None:
    """Whether every segment can have so many queries.

    Raises:
        SpecError: Less than one, or segments of which there may be more than items.
    """
    if queries is not None and (queries < 1 or per not in ("item", "clip", "group")):
        raise SpecError(f"{declaration!r}: expected queries of at least 1, and per='item', 'clip' or 'group' with them")


@dataclass(frozen=True)
class MaxSeqlen(Buffer):
    """The most rows a segment may have: a Python int, frozen at capture.

    It is the `max_seqlen` of the budget; of windows their own size, where that is less.

    Attributes:
        name: The argument it fills.
        per: What a segment is; items with a longer one do not go into a budget.
    """

    any_segments = False
    name: str = "max_seqlen"
    per: Per = "item"

    def produce(self, table: ItemTable, module: nn.Module) -> int:
        """The most rows that the budget allows."""
        return table.max_seqlen(self.per)
