"""What comes out: which rows of which tensors belong to the items, and how to put the caller's object together."""

import dataclasses
import enum
import operator
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.errors import SpecError
from varlen_graphs.packing import Span
from varlen_graphs.table import ItemTable


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
        return tensor[(slice(None),) * self.rows_dim + self.place(span)]

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
        if number < 1 or self.rows_dim < 0:
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
class Entries(Extent):
    """A tensor whose entries an item follow from its rows, in a way that is no plain ratio: tokens of audio, say.

    How many there are the host finds out item by item. So a call whose items are described on the GPU costs one copy of
    them to the host.

    Attributes:
        of_item: How many entries an item of so many rows has.
        at_budget: How many the tensor has at a budget: at least as many as any items have that the budget holds. Those
            of the items come first, in their order.
        rows_dim: In which dimension the entries lie: 1 for `[1, entries, dim]`.
    """

    dims = ("entries",)
    of_item: Callable[[int], int]
    at_budget: Callable[[Budget], int]
    rows_dim: int = 0

    def __post_init__(self) -> None:
        self._check(1)

    def shape(self, budget: Budget) -> tuple[int, ...]:
        """As of `Extent`."""
        return (self.at_budget(budget),)

    def place(self, span: Span) -> tuple[slice, ...]:
        """As of `Extent`."""
        start = sum(map(self.of_item, span.all_rows[: span.item]))
        return (slice(start, start + sum(map(self.of_item, span.all_rows[span.item : span.item + span.items]))),)

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


class Outputs:
    """Declarations for an output with named fields: a dataclass, a `ModelOutput`, or a dict.

    Example: `Outputs(last_hidden_state=Rows(), pooler_output=Rows(every=4))`.
    """

    def __init__(self, **fields: "Declared") -> None:
        self.fields = fields

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


Declared = Extent | Outputs | Sequence["Declared"]
"""How an output is declared: one `Extent` for every tensor below it, or one declaration a part."""


def with_rows(declared: Declared, rows: Extent) -> Declared:
    """A declaration with `rows` in the place of every `Rows`."""
    if isinstance(declared, Extent):
        return rows if isinstance(declared, Rows) else declared
    if isinstance(declared, Outputs):
        return Outputs(**{name: with_rows(part, rows) for name, part in declared.fields.items()})
    return [with_rows(part, rows) for part in declared]


def extents(declared: Declared) -> list[Extent]:
    """Every extent in a declaration."""
    if isinstance(declared, Extent):
        return [declared]
    parts: Iterable[Declared] = declared.fields.values() if isinstance(declared, Outputs) else declared
    return [extent for part in parts for extent in extents(part)]


Rebuild = Callable[[Sequence[Tensor]], Any]


@dataclasses.dataclass
class Parts:
    """An output taken apart.

    Attributes:
        tensors: Its tensors.
        extents: What each of them is.
        constants: Its Python values.
        rebuild: Puts other tensors in the places of its own in a new object. Holds none of its tensors.
    """

    tensors: list[Tensor]
    extents: list[Extent]
    constants: list[Any]
    rebuild: Rebuild

    def active(self, span: Span) -> list[Tensor]:
        """Views of the entries that belong to a span."""
        return [extent.part(tensor, span) for tensor, extent in zip(self.tensors, self.extents, strict=True)]


CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
"""What an output may hold beside tensors: values that nothing can be hidden in."""


def check_extents(parts: Parts, budget: Budget) -> None:
    """Whether every tensor has the entries its declaration gives it at a budget.

    Raises:
        SpecError: One has not.
    """
    for tensor, extent in zip(parts.tensors, parts.extents, strict=True):
        sizes = extent.shape(budget)
        if tensor.shape[extent.rows_dim :][: len(sizes)] != sizes:
            expected = ", ".join([*["any size"] * extent.rows_dim, *map(str, sizes), "..."])
            raise SpecError(
                f"an output of shape {list(tensor.shape)} is declared as {extent}: expected [{expected}] at {budget}; "
                "declare it as Rows(every=...), Items(rows=...) or Entries(...) to match"
            )


def clear_gaps(parts: Parts, table: ItemTable) -> None:
    """Fill what tensors hold between items with zeros."""
    parts.tensors = [extent.clear(x, table) for x, extent in zip(parts.tensors, parts.extents, strict=True)]


def flatten(output: Any, declared: Declared) -> Parts:
    """Take an output apart.

    Args:
        output: Tensors in tuples, lists, mappings, dataclasses, `ModelOutput`s, and Python values.
        declared: What its tensors are.

    Raises:
        SpecError: A declaration does not match the output, or the output holds an object of another kind.
    """
    parts = Parts([], [], [], rebuild=lambda tensors: None)
    parts.rebuild = _visit(output, declared, "output", parts)
    return parts


def _visit(part: Any, declared: Declared, path: str, parts: Parts) -> Rebuild:
    if isinstance(part, Tensor):
        if not isinstance(declared, Extent):
            raise SpecError(
                f"{path} is a tensor but is declared as {declared!r}: expected Rows(...), Items(...) or Entries(...)"
            )
        parts.tensors.append(part)
        parts.extents.append(declared)
        return operator.itemgetter(len(parts.tensors) - 1)
    if isinstance(part, CONSTANTS):
        parts.constants.append(part)
        return lambda tensors: part
    kind = type(part)  # not `part` itself, in the functions below: they outlive its tensors
    if dataclasses.is_dataclass(part):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
        makes = _visit_fields(fields, declared, path, parts)
        construct = _constructor(kind, fields)
        return lambda tensors: construct({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, Mapping):
        makes = _visit_fields(part, declared, path, parts)
        return lambda tensors: kind({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, tuple | list):
        each = [declared] * len(part) if isinstance(declared, Extent) else declared
        if isinstance(each, Outputs) or len(each) != len(part):
            raise SpecError(f"{path} has {len(part)} parts but is declared as {declared!r}")
        entries = [_visit(p, d, f"{path}[{i}]", parts) for i, (p, d) in enumerate(zip(part, each, strict=True))]
        if hasattr(part, "_fields"):
            return lambda tensors: kind(*(make(tensors) for make in entries))
        return lambda tensors: kind(make(tensors) for make in entries)
    raise SpecError(
        f"{path} is a {kind.__name__}, which may hide tensors: expected tensors, Python values, and tuples, lists, "
        "mappings and dataclasses of them; return one of these, or pass forward= with a function that does"
    )


def _constructor(kind: type, fields: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """How to make a dataclass from its fields.

    That of a `ModelOutput`, a dataclass that is an ordered dict too, takes longer than several launches. What it makes
    of these fields is looked at once: if it keeps each as an attribute, and as an entry unless it is `None`, so does
    this.
    """
    if not issubclass(kind, OrderedDict):
        return lambda values: kind(**values)
    entries = [name for name, value in fields.items() if value is not None]
    made = kind(**fields)
    plain = list(vars(made)) == list(fields) and all(vars(made)[name] is value for name, value in fields.items())
    if not plain or list(made) != entries or any(made[name] is not fields[name] for name in entries):
        return lambda values: kind(**values)

    def construct(values: dict[str, Any]) -> Any:
        made = kind.__new__(kind)
        vars(made).update(values)
        for name in entries:
            OrderedDict.__setitem__(made, name, values[name])
        return made

    return construct


def _visit_fields(fields: Mapping[str, Any], declared: Declared, path: str, parts: Parts) -> dict[str, Rebuild]:
    if isinstance(declared, Extent):
        declared = Outputs(**dict.fromkeys(fields, declared))
    if not isinstance(declared, Outputs):
        raise SpecError(f"{path} has fields {list(fields)} but is declared as {declared!r}: expected Outputs(...)")
    unknown = [name for name in declared.fields if name not in fields]
    missing = [name for name in fields if name not in declared.fields and not isinstance(fields[name], CONSTANTS)]
    if unknown or missing:
        raise SpecError(
            f"{path} has fields {list(fields)}; not Python values but not declared: {missing or 'none'}; declared but "
            f"absent: {unknown or 'none'}; expected one declaration for each field with tensors"
        )
    return {
        name: _visit(field, declared.fields.get(name, Rows()), f"{path}.{name}", parts)
        for name, field in fields.items()
    }
