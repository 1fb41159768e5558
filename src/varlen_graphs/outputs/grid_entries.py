"""Outputs whose number of entries per item follows from the sides of its grid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.outputs.entries import CountedEntries


@dataclass(frozen=True)
class GridEntries(CountedEntries):
    """Tensor whose number of entries per item is a function of its grid and columns, such as a token after each line.

    The host counts the entries item by item, so items described on the GPU cost one copy to the host.

    Attributes:
        of_item: Maps `(t, h, w, *columns)` of an item to its number of entries. It may raise `LayoutError` for items
            that the module does not take.
        at_budget: Maps a budget to the number of entries of the tensor, which must be at least that of any items that
            fit the budget. Entries of items come first, in the order of the items.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.

    Raises:
        SpecError: `rows_dim` is negative, or a function is none.
    """

    of_item: Callable[..., int]
    at_budget: Callable[[Budget], int]
    rows_dim: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        self._check(1)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the number of entries at a budget."""
        return (self.at_budget(budget),)

    def count(self, item: Sequence[int]) -> int:
        """Return the number of entries of an item."""
        return self.of_item(*item)
