"""Argument that describes items by their number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.checks.values import as_list, is_integers, size_of
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.columns import Column


@dataclass(frozen=True)
class Lengths(LayoutArgument):
    """Argument that describes items by their number of rows: documents, audio clips, ragged sequences.

    A module that takes the argument receives it as int64 `[items]`, with 0 for padding items. With `padded=True` the
    rows are a padded batch, `[batch, length, ...]`.

    Attributes:
        name: Name of the argument. A call may bring a list, or a tensor `[items]` on the CPU or the GPU. A tensor on
            the GPU costs one copy to the host unless the rows are packed, and the smallest budget fits any items that
            it could describe.
        columns: Extra integers that each item carries.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
            Calls do not bring them, and budgets do not count them.
        padded: If True, the rows are a batch of items, each padded on the right to the same length.
    """

    name: str = "lengths"
    columns: tuple[Column, ...] = ()
    prefix: int = 0
    padded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, 1, length)`.

        Raises:
            LayoutError: `value` is not integers `[items]`, is empty, or has a length below 0.
        """
        lengths = as_list(self.name, value, "[items] lengths")
        return [(1, 1, size_of(f"{self.name}[{i}]", length, length)) for i, length in enumerate(lengths)]

    def plain(self, entries: list[Any]) -> list[tuple[int, int, int]] | None:
        """Return the items if all entries are certainly valid, or `None`."""
        items = []
        for length in entries:
            if type(length) is not int or not 0 <= length < 2**63:
                return None
            items.append((1, 1, length))
        return items

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return the length of a padded batch, that of the longest item if there are no rows yet, or 0 if packed."""
        if not self.padded:
            return 0
        return shape[1] if shape else max(length for _, _, length in items)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for the module: int64 `[items]`, from the values of an item table."""
        return values[:, 2]

    def is_table(self, value: Any) -> bool:
        """Return True if `value` is a tensor of integers `[items]`, and the rows are packed."""
        return not self.padded and is_integers(value, 1)

    def write(self, value: Tensor, values: Tensor) -> None:
        """Copy a tensor that `is_table` accepts into as many rows of an item table.

        Does not sync if both are on one device.
        """
        values[:, :2].fill_(1)
        values[:, 2].copy_(value)
