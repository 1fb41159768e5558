"""The argument of a call that describes its items."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.items import Layout


class LayoutArgument(ABC):
    """The argument of a call that describes its items.

    Attributes:
        name: The argument.
        columns: Extra integers an item carries.
        merge: What `h` and `w` of every item are divisible by.
        row_multiple: What the rows of every frame are divisible by.
        rows_are: How the rows of a call lie, for messages.
        has_frames: Whether an item may have several frames.
        has_sides: Whether items have a height and a width.
        padded: Whether the rows of a call are a padded batch `[batch, length, ...]`.

    Raises:
        SpecError: `columns` holds something else than columns.
    """

    name: str
    columns: tuple[Column, ...]
    merge: int = 1
    row_multiple: int = 1
    rows_are: ClassVar[str] = "the rows of all items one after another, not a batch of items"
    has_frames: bool = False
    has_sides: ClassVar[bool] = False
    padded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.columns, tuple | list) or not all(isinstance(c, Column) for c in self.columns):
            raise SpecError(
                f"columns={self.columns!r}: expected a tuple of columns, such as (Column('kind'),); mind the comma"
            )

    @property
    def grouped(self) -> bool:
        """Whether adjoining items may belong together: the item table then has a last column that says which do."""
        return any(column.groups for column in self.columns)

    @property
    def pads(self) -> tuple[int, ...]:
        """What an item of padding has beside its size. It begins a group, which is empty."""
        return (*[column.pad for column in self.columns], *[1] * self.grouped)

    @abstractmethod
    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(t, h, w)`.

        Raises:
            LayoutError: It describes no items, or impossible ones.
        """

    def check_rows(self, layout: Layout, shape: Sequence[int], rows: str) -> None:
        """Whether these are the items of the rows that came.

        Args:
            layout: The items.
            shape: The shape of the rows.
            rows: What messages call them.

        Raises:
            LayoutError: There are more or fewer rows.
        """
        if layout.total != shape[0]:
            raise LayoutError(
                f"{self.name} describes {len(layout)} items of {layout.total} rows in all, but {rows} has {shape[0]} "
                f"rows of shape {list(shape[1:])}; pass all rows of exactly these items, in their order"
            )

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """To how many rows each item of a call is padded; 0 where rows are packed.

        Args:
            value: What describes the items.
            items: What it says.
            shape: The shape of the rows; empty where there are none yet.
        """
        return 0

    @abstractmethod
    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table, where it takes this argument."""

    def is_table(self, value: Any) -> bool:
        """Whether `value` is a tensor that can be written into an item table without a look at it."""
        return False

    def write(self, value: Tensor, values: Tensor) -> None:
        """Write such a tensor into as many rows of an item table. No sync where both are on one device."""
        raise NotImplementedError
