"""Arguments that describe items by the grid of their rows: images and videos."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.values import as_list, is_integers, quoted, size_of
from varlen_graphs.errors import LayoutError
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.columns import Column

_PLAIN = frozenset((list, tuple))


@dataclass(frozen=True)
class GridTHW(LayoutArgument):
    """Argument that describes items as `(t, h, w)`: images and videos, in patches before merging.

    A module that takes the argument receives it as int64 `[items, 3]`, with `(0, 0, 0)` for padding items.

    Attributes:
        name: Name of the argument, usually `grid_thw`. A call may bring a list of triples, or a tensor `[items, 3]` on
            the CPU or the GPU. A tensor on the GPU costs one copy to the host unless the smallest budget fits any items
            that it could describe.
        merge: Side of the square of patches that becomes one token; `h` and `w` must be divisible by it.
        columns: Extra integers that each item carries.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
            Calls do not bring them, and budgets do not count them.

    Raises:
        SpecError: `merge` is not an integer of at least 1, `name` no string, or `columns` are not columns.
    """

    name: str = "grid_thw"
    merge: int = 1
    columns: tuple[Column, ...] = ()
    prefix: int = 0
    has_frames = True
    has_sides = True

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(t, h, w)`.

        Raises:
            LayoutError: `value` is not integers `[items, 3]`, is empty, or has a size below 0 or a side that `merge`
                does not divide.
        """
        entries = as_list(self.name, value, "[items, 3] of (t, h, w)")
        items = self.plain(entries)
        if items is not None:
            return items
        items = []
        for index, entry in enumerate(entries):
            if not isinstance(entry, list | tuple) or len(entry) != 3:
                raise LayoutError(f"{self.name}[{index}] is {quoted(entry)}: expected three integers (t, h, w)")
            t, h, w = (size_of(f"{self.name}[{index}]", side, entry) for side in entry)
            _check_merge(f"{self.name}[{index}]", (t, h, w), self.merge)
            items.append((t, h, w))
        return items

    def plain(self, entries: list[Any]) -> list[tuple[int, int, int]] | None:
        """Return the items if all entries are certainly valid, or `None`."""
        items, merge = [], self.merge
        for entry in entries:
            if type(entry) not in _PLAIN or len(entry) != 3:
                return None
            t, h, w = entry
            if not (type(t) is type(h) is type(w) is int and 0 <= t < 2**63 and 0 <= h < 2**63 and 0 <= w < 2**63):
                return None
            if h % merge or w % merge:
                return None
            items.append((t, h, w))
        return items

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for the module: int64 `[items, 3]`, from the values of an item table."""
        return values[:, :3]

    def is_table(self, value: Any) -> bool:
        """Return True if `value` is a tensor of integers `[items, 3]`."""
        return is_integers(value, 2) and value.shape[1] == 3

    def write(self, value: Tensor, values: Tensor) -> None:
        """Copy a tensor that `is_table` accepts into as many rows of an item table.

        Does not sync if both are on one device.
        """
        values[:, :3].copy_(value)


@dataclass(frozen=True)
class GridHW(LayoutArgument):
    """Argument that describes items as `(h, w)`: images, in patches.

    A module that takes the argument receives it as int64 `[items, 2]`, with `(0, 0)` for padding items.

    Attributes:
        name: Name of the argument, such as `spatial_shapes` or `tgt_sizes`. A call may bring a list of pairs, or a
            tensor `[items, 2]` on the CPU or the GPU. A tensor on the GPU costs one copy to the host unless the
            smallest budget fits any items that it could describe.
        merge: Side of the square of patches that becomes one token; `h` and `w` must be divisible by it.
        columns: Extra integers that each item carries.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
            Calls do not bring them, and budgets do not count them.

    Raises:
        SpecError: As for `GridTHW`.
    """

    name: str = "spatial_shapes"
    merge: int = 1
    columns: tuple[Column, ...] = ()
    prefix: int = 0
    has_sides = True

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`.

        Raises:
            LayoutError: `value` is not integers `[items, 2]`, is empty, or has a size below 0 or a side that `merge`
                does not divide.
        """
        items = []
        for index, entry in enumerate(as_list(self.name, value, "[items, 2] of (h, w)")):
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise LayoutError(f"{self.name}[{index}] is {quoted(entry)}: expected two integers (h, w)")
            h, w = (size_of(f"{self.name}[{index}]", side, entry) for side in entry)
            _check_merge(f"{self.name}[{index}]", (h, w), self.merge)
            items.append((1, h, w))
        return items

    def plain(self, entries: list[Any]) -> list[tuple[int, int, int]] | None:
        """Return the items if all entries are certainly valid, or `None`."""
        items, merge = [], self.merge
        for entry in entries:
            if type(entry) not in _PLAIN or len(entry) != 2:
                return None
            h, w = entry
            if not (type(h) is type(w) is int and 0 <= h < 2**63 and 0 <= w < 2**63) or h % merge or w % merge:
                return None
            items.append((1, h, w))
        return items

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for the module: int64 `[items, 2]`, from the values of an item table."""
        return values[:, 1:3]

    def is_table(self, value: Any) -> bool:
        """Return True if `value` is a tensor of integers `[items, 2]`."""
        return is_integers(value, 2) and value.shape[1] == 2

    def write(self, value: Tensor, values: Tensor) -> None:
        """Copy a tensor that `is_table` accepts into as many rows of an item table.

        Does not sync if both are on one device.
        """
        values[:, 0].fill_(1)
        values[:, 1:3].copy_(value)


def _check_merge(name: str, entry: tuple[int, ...], merge: int) -> None:
    """Check that the sides of an item, `(h, w)` or `(t, h, w)`, are divisible by the merge size."""
    if any(side % merge for side in entry[-2:]):
        raise LayoutError(
            f"{name} is {entry}: h and w must be divisible by the merge size {merge}; resize the input to a multiple "
            f"of {merge} patches a side"
        )
