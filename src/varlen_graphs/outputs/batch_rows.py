"""Entries of the rows of a padded batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.entry_counts import EntryCounts
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.outputs.entries import Entries, Extent, Rows, filled

AS_ROWS = EntryCounts(lambda rows: rows)


@dataclass(frozen=True)
class BatchRows(Extent):
    """Meaning of `Rows()`, and of `Entries(of_item)`, in a padded batch: `[batch, length, ...]`.

    Attributes:
        declared: The declaration.
        returned: Number of entries that the module returns for an item.
        counts: Number of those that callers get.
        first: Number of entries before them.
    """

    dims = ("batch", "length")
    gaps = True
    declared: Rows | Entries
    returned: EntryCounts = AS_ROWS
    counts: EntryCounts = AS_ROWS
    first: int = 0

    def __str__(self) -> str:
        return f"{'Rows()' if self.declared == Rows() else self.declared} of a padded batch"

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the `(batch, length)` that the module returns at a budget."""
        return (budget.items, self.returned(budget.max_seqlen))

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slices of the batch that belong to a slice of the items."""
        return (slice(item_slice.item, item_slice.item + item_slice.items), slice(0, self.counts(item_slice.length)))

    def clear(self, tensor: Tensor, table: ItemTable, value: float = 0) -> Tensor:
        """Return the entries that callers get, with `value` past the end of every item."""
        if self.returned is self.counts is AS_ROWS:
            return filled(tensor, ~table.real_rows, value)
        longest = table.budget.max_seqlen
        tensor = tensor[:, self.first : self.first + self.counts(longest)]
        return filled(tensor, ~real_rows(self.counts.lookup(table.item_rows, longest), tensor.shape[1]), value)

    def instead(self, shape: Sequence[int], budget: Budget, others: Sequence[tuple[Sequence[int], Budget]] = ()) -> str:
        """Return what to do about a tensor of this shape at a budget, for messages."""
        length = budget.max_seqlen
        if len(shape) < 2 or shape[0] != budget.items:
            return (
                "declare it as Items(...), or Entries(of_item, at_budget) if the entries of all items lie one after "
                "another"
            )
        ratio = f", Rows(every={length // shape[1]})" if shape[1] and not length % shape[1] else ""
        if shape[1] > length:
            ratio = f", Rows(prefix='kept') with prefix={shape[1] - length} in the layout"
        made = f"Entries(of_item) with a function of the rows that gives {shape[1]} for {length}"
        return f"declare it as Items(){ratio}, or {made}"
