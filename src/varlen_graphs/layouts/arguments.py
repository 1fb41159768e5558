"""Base class of the arguments that describe the items of a call."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_at_least
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import LayoutError, SpecError, counted
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.items import Layout

ROWS_ARE = (
    "the rows of all items one after another, not a batch of items; for batches declare Mask or Lengths(padded=True), "
    "or Batch for items of one size"
)
BATCH_IS = "a batch of items, each padded on the right to the same length"


class LayoutArgument(ABC):
    """Base class of the argument that describes the items of a call.

    Attributes:
        name: Name of the argument.
        columns: Extra integers that each item carries.
        merge: Divisor of `h` and `w` of every item.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
        has_frames: True if an item may have several frames.
        has_sides: True if items have a height and a width.
        padded: True if the rows of a call are a padded batch `[batch, length, ...]`.
        packed: True if the rows of a call are a padded batch, which is packed on its way in.
        has_argument: False if calls bring no argument of this name, and the number of rows tells the items.
        optional: True if calls may leave the argument out.
        one_row: True if each item is one row.
        clean_padding: True if calls of padded batches hold the pad past the end of each item, as the module expects.
        usual: Shape of a row, where the first call may bring another.

    Raises:
        SpecError: `name` is not a string, `columns` is not a tuple or list of `Column`s, or `prefix` is below 0.
    """

    name: str
    columns: tuple[Column, ...]
    merge: int = 1
    prefix: int = 0
    has_frames: bool = False
    has_sides: ClassVar[bool] = False
    padded: bool = False
    packed: bool = False
    has_argument: ClassVar[bool] = True
    optional: bool = False
    one_row: ClassVar[bool] = False
    clean_padding: ClassVar[bool] = False
    usual: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise SpecError(f"{type(self).__name__}(name={quoted(self.name)}): expected the name of an argument")
        if not isinstance(self.columns, tuple | list) or not all(isinstance(c, Column) for c in self.columns):
            raise SpecError(
                f"columns={self.columns!r}: expected a tuple of columns, such as (Column('kind'),); mind the comma"
            )
        check_at_least(self, 1, "merge")
        check_at_least(self, 0, "prefix")
        object.__setattr__(self, "prefix", int(self.prefix))  # one of NumPy would reach modules in max_seqlen

    @cached_property
    def row_multiple(self) -> int:
        """Divisor of the number of rows of every frame."""
        return self.merge**2

    @property
    def rows_are(self) -> str:
        """Arrangement of the rows of a call, as error messages describe it."""
        return BATCH_IS if self.padded or self.packed else ROWS_ARE

    @property
    def grouped(self) -> bool:
        """True if adjoining items may form groups. The item table then has a last column that marks their starts."""
        return any(column.groups for column in self.columns)

    @property
    def pads(self) -> tuple[int, ...]:
        """Values of a padding item after `t, h, w`. Each padding item starts an empty group of its own."""
        return (*[column.pad for column in self.columns], *[1] * self.grouped)

    def layout(self, items: Iterable[tuple[int, ...]], length: int = 0) -> Layout:
        """Return items with their columns; in a padded batch, padded to `length`, or else to the longest of them."""
        layout = Layout(tuple(items), length, self.grouped)
        return replace(layout, length=layout.longest) if self.padded and not length else layout

    @abstractmethod
    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(t, h, w)`.

        Raises:
            LayoutError: `value` describes no items, or impossible ones; an item may have no rows.
        """

    def plain(self, entries: list[Any]) -> list[tuple[int, int, int]] | None:
        """Return what `parse` returns for a list whose entries are certainly valid; `None` for any other."""
        return None

    def check_rows(self, layout: Layout, shape: Sequence[int], rows: str) -> None:
        """Check that the items fit rows of this `shape`, which error messages call `rows`.

        Raises:
            LayoutError: The number of rows differs, or the items are not those of a batch of this shape.
        """
        if self.padded or self.packed:
            check_batch(self.name, layout, shape, rows)
        elif layout.total != shape[0]:
            is_batch = len(shape) > 1 and shape[0] == len(layout) and shape[1] >= layout.longest
            batch = "; for a padded batch declare Mask or Lengths(padded=True)" if is_batch else ""
            raise LayoutError(
                f"{self.name} describes {counted(len(layout), 'item')} of {counted(layout.total, 'row')} in all, but "
                f"{rows} has "
                f"{counted(shape[0], 'row')} of shape {list(shape[1:])}; pass all rows of exactly these items, in "
                f"their order{batch}"
            )

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return the number of rows to which each item of a call is padded; 0 if the rows are packed.

        `items` are those parsed from `value`, and `shape` is that of the rows, empty if there are no rows yet.
        """
        return 0

    def eager_reason(self, layout: Layout, padded: tuple[int, ...]) -> str | None:
        """Return why only the original module can answer a call of items padded to this size; `None` if graphs can."""
        return None

    def missing(self, shape: Sequence[int]) -> Any:
        """Return what a call stands for that leaves the optional argument out, for rows of this shape."""
        raise NotImplementedError

    @abstractmethod
    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for a module that takes it, computed from the values of an item table."""

    def is_table(self, value: Any) -> bool:
        """Return True if `value` is a tensor that can be copied into an item table without reading it on the host."""
        return False

    def write(self, value: Tensor, values: Tensor) -> None:
        """Copy a tensor that `is_table` accepts into as many rows of an item table, without sync on one device."""
        raise NotImplementedError


def check_batch(name: str, layout: Layout, shape: Sequence[int], rows: str) -> None:
    """Check that the items described by the argument `name` are those of a batch."""
    if len(layout) != shape[0] or layout.longest > shape[1]:
        raise LayoutError(
            f"{name} describes {counted(len(layout), 'item')}, the longest of {counted(layout.longest, 'row')}, but "
            f"{rows} is "
            f"{list(shape)}: expected [batch, length, ...] with one entry per item, and no item longer than the batch"
        )
