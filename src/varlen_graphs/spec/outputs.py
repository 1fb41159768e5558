"""What comes out: how it is declared, taken apart, and put together again."""

import dataclasses
import enum
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.padded import pad_rows
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.entries import Extent, Rows
from varlen_graphs.watch.sharded import require_replicated


class Outputs:
    """Declarations for an output with named fields: a dataclass, a `ModelOutput`, or a dict.

    Example: `Outputs(last_hidden_state=Rows(), pooler_output=Rows(every=4))`. A dict of declarations means the same,
    and may have keys that are no names.
    """

    def __init__(self, /, **fields: "Declared") -> None:  # any name may be that of a field, `self` too
        self.fields = fields

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


Declared = Extent | Outputs | Mapping[Any, "Declared"] | Sequence["Declared"]
"""How an output is declared: one `Extent` for every tensor below it, or one declaration a part."""


def with_rows(declared: Declared, rows: Extent) -> Declared:
    """A declaration with `rows` in the place of every `Rows`."""
    if isinstance(declared, Extent):
        return rows if isinstance(declared, Rows) else declared
    if isinstance(declared, Outputs | Mapping):
        return {name: with_rows(part, rows) for name, part in _named(declared).items()}
    return [with_rows(part, rows) for part in declared]


def extents(declared: Declared) -> list[Extent]:
    """Every extent in a declaration.

    Raises:
        SpecError: It is none, or some part of it.
    """
    if isinstance(declared, Extent):
        return [declared]
    if isinstance(declared, str) or not isinstance(declared, Outputs | Mapping | Sequence):
        raise SpecError(
            f"{declared!r} does not declare an output: expected an instance of Rows, Items, Groups, Entries or "
            "FrameRows, such as Rows(), or a dict, Outputs(...), tuple or list of these"
        )
    parts: Iterable[Declared] = declared if isinstance(declared, Sequence) else _named(declared).values()
    return [extent for part in parts for extent in extents(part)]


def _named(declared: Outputs | Mapping[Any, Declared]) -> Mapping[Any, Declared]:
    """The declarations of the fields of an output."""
    return declared.fields if isinstance(declared, Outputs) else declared


Rebuild = Callable[[Sequence[Tensor]], Any]

Path = tuple[Hashable, ...]
"""Where a tensor is in an output: names of fields, keys and indices, from the outside in."""


@dataclasses.dataclass
class Parts:
    """An output taken apart.

    Attributes:
        tensors: Its tensors.
        extents: What each of them is.
        paths: Where each of them is.
        constants: Its Python values.
        rebuild: Puts other tensors in the places of its own in a new object. Holds none of its tensors.
    """

    tensors: list[Tensor]
    extents: list[Extent]
    paths: list[Path]
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


def with_padding(
    tensors: Sequence[Tensor], extents: Sequence[Extent], lengths: Sequence[int], length: int
) -> list[Tensor]:
    """Active entries as the batch they are of: what has one for each row is `[batch, length, ...]`, zeros in between.

    Args:
        tensors: What came out.
        extents: What each of them is.
        lengths: The rows of each item.
        length: To how many rows items were padded; 0 where they were not, and nothing changes.
    """
    if not length:
        return [*tensors]
    pairs = zip(tensors, extents, strict=True)
    return [pad_rows(tensor, lengths, length) if isinstance(extent, Rows) else tensor for tensor, extent in pairs]


def flatten(output: Any, declared: Declared) -> Parts:
    """Take an output apart.

    Args:
        output: Tensors in tuples, lists, mappings, dataclasses, `ModelOutput`s, and Python values.
        declared: What its tensors are.

    Raises:
        SpecError: A declaration does not match the output, or the output holds an object of another kind, or a tensor
            of which each rank has a shard.
    """
    parts = Parts([], [], [], [], rebuild=lambda tensors: None)
    parts.rebuild = _visit(output, declared, (), parts)
    return parts


def at(output: Any, path: Path) -> Any:
    """What is at a place of an output; `None` where it has no such place."""
    for step in path:
        if isinstance(output, Mapping) and not dataclasses.is_dataclass(output):
            output = output.get(step)
        elif isinstance(step, str):
            output = getattr(output, step, None)
        else:
            indexed = isinstance(output, tuple | list) and isinstance(step, int) and 0 <= step < len(output)
            output = output[step] if indexed else None
    return output


def name_of(path: Path) -> str:
    """What messages call a place of an output."""
    return "output" + "".join(f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in path)


def _visit(part: Any, declared: Declared, path: Path, parts: Parts) -> Rebuild:
    if isinstance(part, Tensor):
        if not isinstance(declared, Extent):
            raise SpecError(
                f"{name_of(path)} is a tensor but is declared as {declared!r}: expected Rows(...), Items(...) or "
                "Entries(...)"
            )
        parts.tensors.append(require_replicated(part, name_of(path)))
        parts.extents.append(declared)
        parts.paths.append(path)
        return operator.itemgetter(len(parts.tensors) - 1)
    if isinstance(part, CONSTANTS):
        parts.constants.append(part)
        return lambda tensors: part
    kind = type(part)  # not `part` itself, in the functions below: they outlive its tensors
    if dataclasses.is_dataclass(part) and not isinstance(part, tuple | list):
        fields = _attributes(part)
        makes = _visit_fields(fields, declared, path, parts)
        construct = _constructor(part, fields)
        _check_anew(part, construct, fields, path)
        return lambda tensors: construct({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, Mapping):
        makes = _visit_fields(part, declared, path, parts)
        _check_anew(part, kind, dict(part.items()), path)
        return lambda tensors: kind({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, tuple | list):
        each = [declared] * len(part) if isinstance(declared, Extent) else declared
        if isinstance(each, Outputs | Mapping) or len(each) != len(part):
            raise SpecError(f"{name_of(path)} has {len(part)} parts but is declared as {declared!r}")
        entries = [_visit(p, d, (*path, i), parts) for i, (p, d) in enumerate(zip(part, each, strict=True))]
        named = hasattr(part, "_fields")
        _check_anew(part, (lambda values: kind(*values)) if named else kind, list(part), path)
        if named:
            return lambda tensors: kind(*(make(tensors) for make in entries))
        return lambda tensors: kind(make(tensors) for make in entries)
    raise SpecError(
        f"{name_of(path)} is a {kind.__name__}, which may hide tensors: expected tensors, Python values, and tuples, "
        "lists, mappings and dataclasses of them; return one of these, or pass forward= with a function that does"
    )


def _attributes(part: Any) -> dict[str, Any]:
    """What is set on an object: the fields of a dataclass first, in their order."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = {field.name: getattr(part, field.name) for field in fields if hasattr(part, field.name)}
    return values | getattr(part, "__dict__", {})


def _constructor(part: Any, attributes: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """How to make a dataclass of its attributes.

    Not by its own constructor: that may change values (`__post_init__`), as it did when the module called it. What has
    entries too, as a `ModelOutput` has, has them of the attributes by these names.
    """
    kind: Any = type(part)
    slotted = not attributes.keys() <= getattr(part, "__dict__", {}).keys()
    set_entry = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    entries = [name for name in part if name in attributes] if isinstance(part, dict) else []

    def construct(values: Mapping[str, Any]) -> Any:
        made = kind.__new__(kind)
        if slotted:
            for name, value in values.items():
                object.__setattr__(made, name, value)
        else:
            vars(made).update(values)  # at once, which is faster
        for name in entries:
            set_entry(made, name, values[name])
        return made

    return construct


def _check_anew(part: Any, construct: Callable[[Any], Any], values: Any, path: Path) -> None:
    """Whether what is made of the values that an object holds is like it.

    Raises:
        SpecError: It cannot be made, or lacks something, or holds something else.
    """
    kind = type(part)
    if kind in (dict, list, tuple):
        return
    try:
        # Of the very values, so that == finds the same objects, and does not compare tensors.
        alike, why = _held(construct(values)) == _held(part), "that would lose or change what it holds"
    except Exception as error:  # of a constructor, or of == between other objects
        alike, why = False, f"{type(error).__name__}: {error}"
    if not alike:
        raise SpecError(
            f"{name_of(path)} is a {kind.__name__} with attributes {list(_attributes(part))}, which cannot be made "
            f"anew of its parts ({why}): expected nothing beside the fields of a dataclass or the entries of a "
            "mapping, list or tuple; return a plain one, or pass forward= with a function that does"
        )


def _held(part: Any) -> tuple[list[Any], dict[str, Any]]:
    """The entries and attributes of an object."""
    entries = part.items() if isinstance(part, Mapping) else part if isinstance(part, tuple | list) else ()
    return [*entries], _attributes(part)


def _visit_fields(fields: Mapping[Any, Any], declared: Declared, path: Path, parts: Parts) -> dict[Any, Rebuild]:
    if not isinstance(declared, Extent | Outputs | Mapping):
        raise SpecError(
            f"{name_of(path)} has fields {list(fields)} but is declared as {declared!r}: expected Outputs(...)"
        )
    each = dict.fromkeys(fields, declared) if isinstance(declared, Extent) else _named(declared)
    unknown = [name for name in each if name not in fields]
    missing = [name for name in fields if name not in each and not isinstance(fields[name], CONSTANTS)]
    if unknown or missing:
        raise SpecError(
            f"{name_of(path)} has fields {list(fields)}; not Python values but not declared: {missing or 'none'}; "
            f"declared but absent: {unknown or 'none'}; expected one declaration for each field with tensors"
        )
    return {name: _visit(field, each.get(name, Rows()), (*path, name), parts) for name, field in fields.items()}
