"""Where segments begin, and how long the longest is."""

from dataclasses import dataclass

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.layout import Per
from varlen_graphs.table import ItemTable


@dataclass(frozen=True)
class CuSeqlens(Buffer):
    """Cumulative segment lengths, int32 `[segments + 1]`: starts at 0, and the tail repeats the number of active rows.

    Attributes:
        name: The argument it fills.
        per: What a segment is: `"frame"`, `"item"`, `"clip"` (all frames of an item attend to each other), or
            `Windows(side)` of rows that `WindowIndex` brought into their order.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "cu_seqlens"
    per: Per = "item"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int32 `[segments + 1]`."""
        return table.cu_seqlens(self.per)


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
