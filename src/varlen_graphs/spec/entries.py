"""How many entries a tensor has for the rows and items of a call, and which of them belong to which."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.span import Span


class Extent(ABC):
    """How many entries a tensor has, and which of them belong to the items.

    Attributes:
        dims: What messages call the dimensions of the entries, which adjoin.
        gaps: Whether some entries between those of items belong to none. They hold zeros.
        rows_dim: The first of these dimensions: 1 for `[1, entries, dim]`.
    """

    dims: ClassVar[tuple[str, ...]]
    gaps: ClassVar[bool] = False
    rows_dim: int = 0

    @abstractmethod
    def shape(self, budget: Budget) -> tuple[int, ...]:
        """Entries at a budget."""

    @abstractmethod
    def place(self, span: Span) -> tuple[slice, ...]:
        """The entries that belong to a span."""

    def part(self, tensor: Tensor, span: Span) -> Tensor:
        """A view of the entries that belong to a span."""
        place = self.place(span)
        return tensor[(slice(None),) * self.rows_dim + place if self.rows_dim else place]

    def size(self, span: Span) -> tuple[int, ...]:
        """How many entries there are up to the end of a span."""
        return tuple([part.stop for part in self.place(span)])

    def resize(self, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """A shape like this with so many entries."""
        return [*shape[: self.rows_dim], *sizes, *shape[self.rows_dim + len(self.dims) :]]

    def rest(self, tensor: Tensor) -> torch.Size:
        """The shape of one entry of a tensor."""
        return torch.Size(self.resize(tensor.shape, ()))

    def clear(self, tensor: Tensor, table: ItemTable, value: int = 0) -> Tensor:
        """The tensor with `value` wherever it has gaps; itself if it has none."""
        return tensor

    def _check(self, number: int) -> None:
        integers = isinstance(number, Integral) and isinstance(self.rows_dim, Integral)
        if not integers or number < 1 or self.rows_dim < 0:
            raise SpecError(f"{self!r}: expected an integer of at least 1, and rows_dim to be at least 0")


@dataclasses.dataclass(frozen=True)
class Rows(Extent):
    """A tensor with one entry for every `every` rows of the input, `[rows / every, ...]`.

    Attributes:
        every: How many rows become one; 4 after a 2 x 2 merge.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    dims = ("rows",)
    every: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.every)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (budget.rows // self.every,)

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        return (slice(span.row // self.every, (span.row + span.rows) // self.every),)


@dataclasses.dataclass(frozen=True)
class Items(Extent):
    """A tensor with `rows` entries an item, `[items * rows, ...]`: pooled vectors, or the queries of a resampler.

    Attributes:
        rows: Entries an item.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    dims = ("items",)
    rows: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.rows)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (budget.items * self.rows,)

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        return (slice(span.item * self.rows, (span.item + span.items) * self.rows),)


@dataclasses.dataclass(frozen=True)
class Groups(Extent):
    """A tensor with `rows` entries a group of items, `[groups * rows, ...]`, those of the items' groups first.

    At a budget it has room for as many groups as items. Which items are a group a `NestedColumn` tells.

    Attributes:
        rows: Entries a group.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    dims = ("groups",)
    rows: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.rows)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (budget.items * self.rows,)

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        return (slice(span.group * self.rows, (span.group + span.groups) * self.rows),)


class CountedEntries(Extent):
    """A tensor whose entries the host counts item by item. Those of the items come first, in their order."""

    dims = ("entries",)

    @abstractmethod
    def count(self, item: Sequence[int]) -> int:
        """Entries of an item `(t, h, w, *columns)`."""

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        start = sum(map(self.count, span.all_items[: span.item]))
        return (slice(start, start + sum(map(self.count, span.all_items[span.item : span.item + span.items]))),)

    def part(self, tensor: Tensor, span: Span) -> Tensor:
        """A view of the entries that belong to a span.

        Raises:
            SpecError: There are not so many.
        """
        (needed,), came = self.size(span), tensor.shape[self.rows_dim]
        if needed > came:
            raise SpecError(
                f"the items have {needed} entries by {self}, but the output has room for {came}: expected at_budget to "
                "give as many as any items have that fit the budget"
            )
        return super().part(tensor, span)


@dataclasses.dataclass(frozen=True)
class Entries(CountedEntries):
    """A tensor whose entries an item follow from its rows, in a way that is no plain ratio: tokens of audio, say.

    How many there are the host finds out item by item. So a call whose items are described on the GPU costs one copy of
    them to the host.

    Attributes:
        of_item: How many entries an item of so many rows has.
        at_budget: How many the tensor has at a budget: at least as many as any items have that the budget holds. Those
            of the items come first, in their order.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    of_item: Callable[[int], int]
    at_budget: Callable[[Budget], int]
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(1)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (self.at_budget(budget),)

    def count(self, item: Sequence[int]) -> int:
        """As of `CountedEntries`."""
        return self.of_item(item[0] * item[1] * item[2])


@dataclasses.dataclass(frozen=True)
class FrameRows(CountedEntries):
    """A tensor with one entry for every `every` rows of a frame, whatever the number of frames: they were pooled.

    The tensor has `rows / every` entries at a budget, as if each item had one frame. Those of the items come first, in
    their order. As with `Entries`, items that are described on the GPU cost one copy to the host.

    Attributes:
        every: How many rows of a frame become one; 4 after a 2 x 2 merge.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    every: int = 1
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(self.every)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (budget.rows // self.every,)

    def count(self, item: Sequence[int]) -> int:
        """As of `CountedEntries`."""
        return item[1] * item[2] // self.every


class BatchRows(Extent):
    """What `Rows()` is of a padded batch: a tensor with one entry for every row of it, `[batch, length, ...]`."""

    dims = ("batch", "length")
    gaps = True

    def __str__(self) -> str:  # what the user wrote
        return "Rows() of a padded batch"

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (budget.items, budget.max_seqlen)

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        return (slice(span.item, span.item + span.items), slice(0, span.length))

    def clear(self, tensor: Tensor, table: ItemTable, value: int = 0) -> Tensor:
        """The tensor with `value` past the end of every item, whatever was there."""
        padding = ~table.real_rows
        return tensor.masked_fill(padding.view(*padding.shape, *[1] * (tensor.dim() - 2)), value)
