"""Upper bound of segment lengths."""

from dataclasses import dataclass

from torch import nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per


@dataclass(frozen=True)
class MaxSeqlen(Buffer):
    """Upper bound of segment lengths, in rows: a Python int, frozen at capture.

    It is the `max_seqlen` of the budget with the prefix rows of an item, or the rows of one window if segments are
    windows and these have fewer.

    Attributes:
        name: Argument to fill.
        per: Kind of segment; items with a longer segment do not fit the budget.

    Raises:
        SpecError: `per` is no kind of segment.
    """

    any_segments = False
    name: str = "max_seqlen"
    per: Per = "item"

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> int:
        """Return the number of rows that the budget allows per segment."""
        return table.max_seqlen(self.per)
