"""Declared outputs: the number of entries of a tensor, and the entries that belong to each item."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields, is_integer
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.layouts.dtypes import as_before, plain, plain_number
from varlen_graphs.layouts.entry_counts import entries_of
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.packed_batch import Sizes


class Extent(ABC):
    """Number of entries of a tensor, and the entries that belong to each item.

    Attributes:
        dims: Names of the entry dimensions in error messages. These dimensions adjoin.
        gaps: True if there are entries between those of the items that belong to none. They hold zeros.
        rows_dim: First entry dimension: 1 for `[1, entries, dim]`.
    """

    dims: ClassVar[tuple[str, ...]]
    gaps: ClassVar[bool] = False
    rows_dim: int = 0

    @abstractmethod
    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the sizes of the entry dimensions at a budget."""

    @abstractmethod
    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slices of the entry dimensions that belong to a slice of the items."""

    def part(self, tensor: Tensor, item_slice: ItemSlice) -> Tensor:
        """Return a view of the entries that belong to a slice of the items."""
        place = self.place(item_slice)
        if len(place) == 1 and not self.rows_dim:  # nearly always, and faster without a tuple
            return tensor[place[0]]
        return tensor[(slice(None),) * self.rows_dim + place]

    def size(self, item_slice: ItemSlice) -> tuple[int, ...]:
        """Return the sizes of the entry dimensions up to the end of a slice."""
        return tuple([part.stop for part in self.place(item_slice)])

    def resize(self, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return `shape` with `sizes` in place of the entry dimensions."""
        return [*shape[: self.rows_dim], *sizes, *shape[self.rows_dim + len(self.dims) :]]

    def rest(self, shape: Sequence[int]) -> torch.Size:
        """Return the shape of one entry of a tensor of this shape."""
        return torch.Size(self.resize(shape, ()))

    def clear(self, tensor: Tensor, table: ItemTable, value: float = 0) -> Tensor:
        """Return the tensor with `value` in its gaps, or the tensor itself if it has none."""
        return tensor

    def instead(self, shape: Sequence[int], budget: Budget, others: Sequence[tuple[Sequence[int], Budget]] = ()) -> str:
        """Return what to do about a tensor of this shape at a budget, for messages; `others` are those elsewhere."""
        came = _size(shape, self.rows_dim)
        elsewhere = [(_size(shape, self.rows_dim), budget) for shape, budget in others]
        if elsewhere and all(size == came for size, _ in elsewhere):
            return (
                f"it has {counted(came, 'row')} whatever the rows and items are: return one for each row "
                "or item, masked where there is none"
            )
        fitting = [one for one in _fitting(came, budget) if all(one in _fitting(*other) for other in elsewhere)]
        more = came - budget.rows
        if more > 0 and not more % budget.items:
            fitting.append(f"Rows(prefix='kept') with prefix={more // budget.items} in the layout")
        fitting.append("or " * bool(fitting) + "Entries(of_item, at_budget)")
        return f"declare it as {', '.join(fitting)} to match"

    def padded(self, sizes: Sizes) -> Sizes | None:
        """Return the sizes in entries of items of these sizes, where callers get a batch for one that was packed.

        `None` if they get the entries packed.
        """
        return None

    def _check(self, count: int) -> None:
        if not (is_integer(count) and is_integer(self.rows_dim)) or count < 1 or self.rows_dim < 0:
            raise SpecError(f"{self!r}: expected an integer of at least 1, and rows_dim to be at least 0")


def _size(shape: Sequence[int], dim: int) -> int:
    return [*shape[dim:], 0][0]


def _fitting(came: int, budget: Budget) -> list[str]:
    """Return the declarations by a ratio that fit a number of entries at a budget."""
    fitting = []
    if came and not budget.rows % came:
        fitting.append(f"Rows(every={budget.rows // came})")
    if came and not came % budget.items:
        fitting.append(f"Items(rows={came // budget.items})")
    return fitting


@dataclasses.dataclass(frozen=True)
class _ByRows(Extent):
    """Base of extents with `rows // every` entries at a budget."""

    every: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.every)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the number of entries at a budget."""
        return (budget.rows // self.every,)


@dataclasses.dataclass(frozen=True)
class _ByItems(Extent):
    """Base of extents with `items * rows` entries at a budget."""

    rows: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.rows)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the number of entries at a budget."""
        return (budget.items * self.rows,)


@dataclasses.dataclass(frozen=True)
class Rows(_ByRows):
    """Tensor with one entry per `every` rows of the input: `[rows / every, ...]`, or `[batch, length / every, ...]`.

    Attributes:
        every: Number of rows per entry; 4 after a 2 x 2 merge.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.
        prefix: Where the layout declares prefix rows and the tensor has an entry for each of them, before those of the
            rows of the item: `"kept"` if callers get all, `"dropped"` or `"only"` if they get all but those, or those.

    Raises:
        SpecError: `every` is below 1, `rows_dim` is negative, or `prefix` is something else or comes with a ratio.
    """

    dims = ("rows",)
    prefix: Literal["kept", "dropped", "only"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.prefix and self.every > 1:
            raise SpecError(f"{self!r}: expected an entry for each row and prefix row, without every=")

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slice of the entries that belong to a slice of the items."""
        return (slice(item_slice.row // self.every, (item_slice.row + item_slice.rows) // self.every),)

    def padded(self, sizes: Sizes) -> Sizes:
        """See `Extent.padded`."""
        return sizes if self.every == 1 else [(rows // self.every,) for (rows,) in sizes]


@dataclasses.dataclass(frozen=True)
class Items(_ByItems):
    """Tensor with `rows` entries per item, `[items * rows, ...]`, such as pooled vectors or queries of a resampler.

    Attributes:
        rows: Number of entries per item.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.

    Raises:
        SpecError: `rows` is below 1, or `rows_dim` is negative.
    """

    dims = ("items",)

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slice of the entries that belong to a slice of the items."""
        return (slice(item_slice.item * self.rows, (item_slice.item + item_slice.items) * self.rows),)


@dataclasses.dataclass(frozen=True)
class Groups(_ByItems):
    """Tensor with `rows` entries per group of items, `[groups * rows, ...]`, padding last.

    A `NestedColumn` defines the groups. At a budget, the tensor has room for as many groups as items.

    Attributes:
        rows: Number of entries per group.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.

    Raises:
        SpecError: `rows` is below 1, or `rows_dim` is negative.
    """

    dims = ("groups",)

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slice of the entries that belong to a slice of the items."""
        return (slice(item_slice.group * self.rows, (item_slice.group + item_slice.groups) * self.rows),)


class CountedEntries(Extent):
    """Tensor whose entries the host counts item by item. Entries of items come first, in the order of the items."""

    dims = ("entries",)

    @abstractmethod
    def count(self, item: Sequence[int]) -> int:
        """Return the number of entries of an item `(t, h, w, *columns)`."""

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return the slice of the entries that belong to a slice of the items."""
        start = sum(map(self.count, item_slice.all_items[: item_slice.item]))
        return (
            slice(
                start,
                start
                + sum(map(self.count, item_slice.all_items[item_slice.item : item_slice.item + item_slice.items])),
            ),
        )

    def part(self, tensor: Tensor, item_slice: ItemSlice) -> Tensor:
        """Return a view of the entries that belong to a slice of the items.

        Raises:
            SpecError: The tensor has fewer entries than the items need.
        """
        (needed,), came = self.size(item_slice), tensor.shape[self.rows_dim]
        if needed > came:
            raise SpecError(
                f"the items have {needed} entries by {self}, but the output has room for {came}: expected at_budget to "
                "return at least the entries of any items that fit the budget; return a larger number"
            )
        return super().part(tensor, item_slice)


@dataclasses.dataclass(frozen=True)
class Entries(CountedEntries):
    """Tensor whose number of entries per item is a function of its rows other than a ratio, such as audio tokens.

    The host counts the entries item by item, so items described on the GPU cost one copy to the host.

    Attributes:
        of_item: Maps the number of rows of an item to its number of entries, such as
            `lambda rows: (rows - 1) // 2 + 1` behind a convolution of stride 2. It never decreases.
        at_budget: Maps a budget to the number of entries of the tensor, which must be at least that of any items that
            fit the budget. Entries of items come first, in the order of the items. `None` for a padded batch, where the
            tensor is `[batch, of_item(length), ...]`.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.

    Raises:
        SpecError: `rows_dim` is negative, or a function is none.
    """

    of_item: Callable[[int], int]
    at_budget: Callable[[Budget], int] | None = None
    rows_dim: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        self._check(1)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return the number of entries at a budget."""
        assert self.at_budget is not None  # noqa: S101 - checked when it was declared
        return (self.at_budget(budget),)

    def count(self, item: Sequence[int]) -> int:
        """Return the number of entries of an item."""
        return entries_of(self.of_item, item[0] * item[1] * item[2])


@dataclasses.dataclass(frozen=True)
class FrameRows(_ByRows, CountedEntries):
    """Tensor with one entry per `every` rows of a frame, pooled over the frames of each item.

    The tensor has `rows / every` entries at a budget, as if each item had one frame. Entries of items come first, in
    the order of the items. As with `Entries`, items described on the GPU cost one copy to the host.

    Attributes:
        every: Number of rows of a frame per entry; 4 after a 2 x 2 merge.
        rows_dim: Dimension of the entries: 1 for `[1, entries, dim]`.

    Raises:
        SpecError: `every` is below 1, or `rows_dim` is negative.
    """

    def count(self, item: Sequence[int]) -> int:
        """Return the number of entries of an item."""
        return item[1] * item[2] // self.every


class Whole(Extent):
    """A tensor without entries, which every replay of a call needs as a whole."""

    dims = ()

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Return no sizes."""
        return ()

    def place(self, item_slice: ItemSlice) -> tuple[slice, ...]:
        """Return no slices."""
        return ()


def filled(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """Return the tensor with `value` in the entries of a mask, which has its first dimensions."""
    mask = mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1 and plain(tensor) is tensor:  # no masked_fill
        return torch.where(mask, tensor.new_full((), value), tensor)
    return as_before(plain(tensor).masked_fill(mask, plain_number(value, tensor.dtype)), tensor.dtype)
