"""Items on the host: small integers, checked."""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.errors import LayoutError, SpecError

Order = Literal["raster", "merge_block"]
"""How the rows of a frame are ordered: row by row, or so that the rows of each merge block adjoin."""


INT64_MAX = 2**63 - 1

INTEGERS = frozenset(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
"""The dtypes of tensors of integers."""


@dataclass(frozen=True)
class Layout:
    """The items of one call, known to the host.

    Attributes:
        items: One tuple an item: `(t, h, w, *columns)`, in rows before any merging.
        length: To how many rows each item is padded, in a padded batch; 0 where rows are packed.
        grouped: Whether adjoining items may belong together: the last number of an item is then 1 where it begins a
            group, and 0 where it belongs to the one before.
    """

    items: tuple[tuple[int, ...], ...]
    length: int = 0
    grouped: bool = False

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of each item, `t * h * w`."""
        return tuple([item[0] * item[1] * item[2] for item in self.items])

    @cached_property
    def total(self) -> int:
        """Rows of all items."""
        return sum(self.rows)

    @property
    def size(self) -> int:
        """Rows of the call, those that pad a batch included."""
        return self.length * len(self.items) or self.total

    @cached_property
    def group_of(self) -> Sequence[int]:
        """The group of each item; without groups each is alone."""
        if not self.grouped:
            return range(len(self.items))
        return [begun - 1 for begun in accumulate(item[-1] for item in self.items)]

    @cached_property
    def groups(self) -> list[range]:
        """The items of each group, by their indices."""
        firsts = [i for i, group in enumerate(self.group_of) if i == 0 or group != self.group_of[i - 1]]
        return [range(first, end) for first, end in zip(firsts, [*firsts[1:], len(self.items)], strict=True)]

    @cached_property
    def group_rows(self) -> list[int]:
        """Rows of each group."""
        return [sum(self.rows[group.start : group.stop]) for group in self.groups]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Column:
    """An extra integer an item carries, such as a temporal id: an argument of the call, and a column of the item table.

    Attributes:
        name: The argument that brings one integer an item (a list or a tensor `[items]`).
        pad: What the items of padding have there.
        function: What gives one integer an item instead of an argument, from all items of a call: for what depends on
            them all, while a replay may see only some. The host computes it, so items that are described on the GPU are
            copied there.
        default: What items have where a call does not bring the argument, or has `None` for an item. `None`: calls must
            bring it.
        groups: Whether it tells which items belong together; see `NestedColumn`.

    Raises:
        SpecError: `pad` or `default` is no integer.
    """

    name: str
    pad: int = 0
    function: Callable[[Layout], Sequence[int]] | None = None
    default: int | None = None
    groups: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not all(isinstance(value, Integral) for value in (self.pad, 0 if self.default is None else self.default)):
            raise SpecError(f"{self!r}: expected pad to be an integer, and default an integer or None")

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one an item.

        Raises:
            LayoutError: Not one int64 for each item.
        """
        if value is None and self.default is not None:
            return [self.default] * items
        values = as_list(self.name, value, "one for each item")
        if self.default is not None:
            values = [self.default if value is None else value for value in values]
        sound = all(isinstance(v, Integral) and not isinstance(v, bool) and abs(int(v)) <= INT64_MAX for v in values)
        if len(values) != items or not sound:
            raise LayoutError(f"{self.name} is {quoted(values)}: expected one integer for each of the {items} items")
        return [int(value) for value in values]

    def begins(self, value: Any, items: int) -> list[int]:
        """Of values that `parse` takes, whether each item begins a group (1), or belongs to the one before (0)."""
        return [1] * items


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


def is_integers(value: Any, dims: int) -> bool:
    """Whether `value` is a tensor of integers with so many dimensions, and not empty."""
    return (
        isinstance(value, Tensor)
        and value.dtype in INTEGERS
        and is_dense(value)
        and value.dim() == dims
        and value.shape[0] > 0
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has one number after the other in memory, to be read: sparse, nested and meta tensors do not."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def check_numbers(name: str, value: Any, rows: int) -> None:
    """Whether what describes items holds no more numbers than so many rows can need.

    Tensors and arrays may say that they hold far more than they have memory for, and a list of these would not.

    Raises:
        LayoutError: It holds more than three for each row.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    numbers = sum(_numbers(entry) for entry in entries if not isinstance(entry, list | tuple | int))
    if numbers > 3 * rows:
        raise LayoutError(
            f"{name} holds {numbers} numbers, which cannot describe the items of {rows} rows: expected one or three for"
            " each item, and no item without rows"
        )


def _numbers(value: Any) -> int:
    """The entries of a tensor or array; 0 of anything else."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return size if isinstance(size, int) else 0


def as_list(name: str, value: Any, expected: str) -> list[Any]:
    """`value` as a list that is not empty: tensors and arrays are copied to the host, floats are refused there."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGERS:
            raise LayoutError(f"{name} is a {value.dtype} tensor: expected integers, {expected}; try {name}.long()")
        if not is_dense(value):
            raise LayoutError(
                f"{name} is a sparse, nested or meta tensor: expected integers, {expected}, in a dense one"
            )
        value = value.tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{name} is {quoted(value)}: expected integers, {expected}, as a list or a tensor")
    if len(value) == 0:
        raise LayoutError(f"{name} is empty: expected at least one item; skip the call when there is nothing to encode")
    return list(value)


def positive(what: str, size: Any, entry: Any) -> int:
    """A size as an integer, of an entry that messages quote.

    Raises:
        LayoutError: It is no integer, or below 1.
    """
    if not isinstance(size, Integral) or isinstance(size, bool):
        raise LayoutError(f"{what} is {quoted(entry)}: expected integers, got {quoted(size)} ({type(size).__name__})")
    number = int(size)
    if number < 1:
        raise LayoutError(f"{what} is {quoted(entry)}: every size must be at least 1; drop items that are empty")
    if number > INT64_MAX:
        raise LayoutError(f"{what} is {quoted(entry)}: sizes must be below 2**63; these cannot be rows of one call")
    return number


class _Quoting(reprlib.Repr):
    """Abridges what is long or deeply nested."""

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print integers of thousands of digits."""
        return repr(x) if abs(x) <= 2**128 else f"<an integer of {x.bit_length()} bits>"


_QUOTING = _Quoting()
_QUOTING.maxother = _QUOTING.maxstring = 100


def quoted(value: Any) -> str:
    """What came, for messages: a few entries of it, whatever it is."""
    return _QUOTING.repr(value)
