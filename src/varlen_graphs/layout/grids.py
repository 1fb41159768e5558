"""What describes the items of packed rows: grids of images and videos, and lengths."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from torch import Tensor

from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.values import INT64_MAX, as_list, is_integers, positive, quoted


@dataclass(frozen=True)
class GridTHW(LayoutArgument):
    """The argument that describes items as `(t, h, w)`: images and videos, in patches before merging.

    The module sees it, where it takes that argument, as int64 `[items, 3]` with `(0, 0, 0)` for items of padding.

    Attributes:
        name: The argument, usually `grid_thw`. A call may bring a list of triples, or a tensor `[items, 3]` on the CPU,
            or on the GPU, which costs one copy to the host unless the smallest budget holds whatever it may say.
        merge: The side of the square of patches that becomes one token; `h` and `w` must be divisible by it.
        columns: Extra integers an item carries.
    """

    name: str = "grid_thw"
    merge: int = 1
    columns: tuple[Column, ...] = ()
    has_frames = True
    has_sides = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.merge, Integral) or self.merge < 1:
            raise SpecError(f"GridTHW(merge={self.merge!r}): expected an integer of at least 1")

    @cached_property
    def row_multiple(self) -> int:  # type: ignore[override]  # read only, as all fields of a frozen class
        """What the rows of every frame are divisible by."""
        return self.merge**2

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(t, h, w)`.

        Raises:
            LayoutError: Not `[items, 3]` integers, no items, a size below 1, or a side that `merge` does not divide.
        """
        entries = as_list(self.name, value, "[items, 3] of (t, h, w)")
        if all(map(self._plain, entries)):
            return list(map(tuple, entries))
        items = []
        for index, entry in enumerate(entries):
            if not isinstance(entry, list | tuple) or len(entry) != 3:
                raise LayoutError(f"{self.name}[{index}] is {quoted(entry)}: expected three integers (t, h, w)")
            t, h, w = (positive(f"{self.name}[{index}]", side, entry) for side in entry)
            if h % self.merge or w % self.merge:
                raise LayoutError(
                    f"{self.name}[{index}] is {(t, h, w)}: h and w must be divisible by the merge size {self.merge}; "
                    f"resize the input to a multiple of {self.merge} patches a side"
                )
            items.append((t, h, w))
        return items

    def _plain(self, entry: Any) -> bool:
        """Whether an entry is beyond doubt; any other is looked at more closely."""
        if type(entry) not in (list, tuple) or len(entry) != 3:
            return False
        t, h, w = entry
        if not type(t) is type(h) is type(w) is int or t > INT64_MAX or h > INT64_MAX or w > INT64_MAX:
            return False
        return t > 0 and h > 0 and w > 0 and not (h % self.merge or w % self.merge)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: int64 `[items, 3]`."""
        return values[:, :3]

    def is_table(self, value: Any) -> bool:
        """Whether `value` is a tensor of integers `[items, 3]`."""
        return is_integers(value, 2) and value.shape[1] == 3

    def write(self, value: Tensor, values: Tensor) -> None:
        """Write such a tensor into as many rows of an item table. No sync where both are on one device."""
        values[:, :3].copy_(value)


@dataclass(frozen=True)
class GridHW(LayoutArgument):
    """The argument that describes items as `(h, w)`: images, in patches.

    The module sees it, where it takes that argument, as int64 `[items, 2]` with `(0, 0)` for items of padding.

    Attributes:
        name: The argument, such as `spatial_shapes` or `tgt_sizes`. A call may bring a list of pairs, or a tensor
            `[items, 2]` on the CPU, or on the GPU, which costs one copy to the host unless the smallest budget holds
            whatever it may say.
        columns: Extra integers an item carries.
    """

    name: str = "spatial_shapes"
    columns: tuple[Column, ...] = ()
    has_sides = True

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`.

        Raises:
            LayoutError: Not `[items, 2]` integers, no items, or a size below 1.
        """
        items = []
        for index, entry in enumerate(as_list(self.name, value, "[items, 2] of (h, w)")):
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise LayoutError(f"{self.name}[{index}] is {quoted(entry)}: expected two integers (h, w)")
            h, w = (positive(f"{self.name}[{index}]", side, entry) for side in entry)
            items.append((1, h, w))
        return items

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: int64 `[items, 2]`."""
        return values[:, 1:3]

    def is_table(self, value: Any) -> bool:
        """Whether `value` is a tensor of integers `[items, 2]`."""
        return is_integers(value, 2) and value.shape[1] == 2

    def write(self, value: Tensor, values: Tensor) -> None:
        """Write such a tensor into as many rows of an item table. No sync where both are on one device."""
        values[:, 0].fill_(1)
        values[:, 1:3].copy_(value)


@dataclass(frozen=True)
class Lengths(LayoutArgument):
    """The argument that describes items by their number of rows: documents, clips of audio, ragged sequences.

    The module sees it, where it takes that argument, as int64 `[items]` with 0 for items of padding.

    Attributes:
        name: The argument. A call may bring a list, or a tensor `[items]` on the CPU, or on the GPU, which costs one
            copy to the host unless the smallest budget holds whatever it may say.
        columns: Extra integers an item carries.
    """

    name: str = "lengths"
    columns: tuple[Column, ...] = ()

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, 1, length)`.

        Raises:
            LayoutError: Not `[items]` integers, no items, or a length below 1.
        """
        lengths = as_list(self.name, value, "[items] lengths")
        return [(1, 1, positive(f"{self.name}[{i}]", length, length)) for i, length in enumerate(lengths)]

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: int64 `[items]`."""
        return values[:, 2]

    def is_table(self, value: Any) -> bool:
        """Whether `value` is a tensor of integers `[items]`."""
        return is_integers(value, 1)

    def write(self, value: Tensor, values: Tensor) -> None:
        """Write such a tensor into as many rows of an item table. No sync where both are on one device."""
        values[:, :2].fill_(1)
        values[:, 2].copy_(value)
