"""Entries of packed rows behind the prefix rows of each item."""

from dataclasses import dataclass

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.packed_batch import Sizes
from varlen_graphs.outputs.entries import Extent, Rows


@dataclass(frozen=True)
class PrefixedRows(Extent):
    """Meaning of `Rows(prefix=...)` for packed rows: the module returns an entry for each row and prefix row.

    Attributes:
        declared: The declaration.
        prefix: Number of prefix rows of each item.
        rows_dim: Dimension of the entries.
    """

    dims = ("rows",)
    declared: Rows
    prefix: int
    rows_dim: int = 0

    def __str__(self) -> str:
        return str(self.declared)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the number of entries that the module returns at a budget."""
        return (budget.rows + budget.items * self.prefix,)

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slice of the entries that belong to a slice of the items."""
        rows, prefix = self._parts
        start = item_slice.row * rows + item_slice.item * prefix
        return (slice(start, start + item_slice.rows * rows + item_slice.items * prefix),)

    def clear(self, tensor: Tensor, table: ItemTable, value: float = 0) -> Tensor:
        """Return the entries that callers get."""
        rows, prefix = self._parts
        if rows and prefix:
            return tensor
        return tensor.index_select(self.rows_dim, table.row_places if rows else table.prefix_places.flatten())

    def padded(self, sizes: Sizes) -> Sizes:
        """See `Extent.padded`."""
        rows, prefix = self._parts
        return [(length * rows + prefix,) for (length,) in sizes]

    @property
    def _parts(self) -> tuple[bool, int]:
        """True if callers get the entries of rows, and the number of entries of prefix rows they get of each item."""
        kept = self.declared.prefix
        return kept != "only", 0 if kept == "dropped" else self.prefix
