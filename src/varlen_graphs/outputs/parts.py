"""Outputs of a module: flattening to tensors, and rebuilding."""

import dataclasses
import enum
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import GatherIndices, item_sizes, pad_rows
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields, named
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.torch_dispatch.sharded import require_replicated

Rebuild = Callable[[Sequence[Tensor]], Any]

Path = tuple[Hashable, ...]
"""Path of a tensor in an output: field names, keys and indices, from the outside in."""


@dataclasses.dataclass
class Parts:
    """Flattened output.

    Attributes:
        tensors: Tensors of the output.
        extents: Extent of each tensor.
        paths: Path of each tensor.
        constants: Python values of the output.
        containers: Types of what holds tensors and values.
        rebuild: Builds a new output from other tensors. Holds no reference to the tensors of this output.
        values: Python values at declared places, by path; `constants` has those of other fields, too.
    """

    tensors: list[Tensor]
    extents: list[Extent]
    paths: list[Path]
    constants: list[Any]
    containers: list[type]
    rebuild: Rebuild
    values: dict[Path, Any] = dataclasses.field(default_factory=dict)

    def active(self, item_slice: ItemSlice) -> list[Tensor]:
        """Return views of the entries that belong to a slice of the items."""
        return [extent.part(tensor, item_slice) for tensor, extent in zip(self.tensors, self.extents, strict=True)]


CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
"""Types of Python values that an output may hold: no tensor can hide in them."""


class SizeError(SpecError):
    """Raised if an output has another number of entries than declared."""


def check_extents(parts: Parts, budget: Budget, others: Sequence[tuple[Parts, Budget]] = ()) -> None:
    """Check that every tensor has the number of entries of its extent at a budget.

    `others` are the output at other budgets, which the declaration that the message suggests fits as well.

    Raises:
        SizeError: A tensor has another number of entries.
        SpecError: A tensor has too few dimensions.
    """
    for at, (tensor, extent) in enumerate(zip(parts.tensors, parts.extents, strict=True)):
        if tensor.dim() <= extent.rows_dim:
            raise SpecError(
                f"an output of shape {list(tensor.shape)} is declared as {extent}: expected a dimension of rows or "
                f"items, {extent.rows_dim}; return what belongs to the whole call as an entry of each item"
            )
        sizes = extent.shape(budget)
        if tensor.shape[extent.rows_dim :][: len(sizes)] != sizes:
            expected = ", ".join([*["any size"] * extent.rows_dim, *map(str, sizes), "..."])
            elsewhere = [(other.tensors[at].shape, size) for other, size in others]
            raise SizeError(
                f"an output of shape {list(tensor.shape)} is declared as {extent}: expected [{expected}] at {budget}; "
                f"{extent.instead(tensor.shape, budget, elsewhere)}"
            )


def clear_gaps(parts: Parts, table: ItemTable) -> None:
    """Zero the entries between items."""
    parts.tensors = [extent.clear(x, table) for x, extent in zip(parts.tensors, parts.extents, strict=True)]


def with_padding(
    tensors: Sequence[Tensor],
    extents: Sequence[Extent],
    layout: Layout,
    padded: Sequence[int],
    gather_indices: GatherIndices | None = None,
    copies: bool = False,
) -> list[Tensor]:
    """Pad active entries back to a batch: those of rows become `[batch, length, ...]`, with zeros.

    For pictures, `length` is the number of patches of a padded one.

    Args:
        tensors: Active entries of the outputs.
        extents: Extent of each tensor.
        layout: The items.
        padded: Size to which the items of the call were padded; empty if they were not, which changes nothing.
        gather_indices: Keeps the indices of real rows, if it was made for the call before.
        copies: If True, no result is a view of the entries.
    """
    if not padded:
        return [*tensors]
    gather_indices = gather_indices or GatherIndices(tensors[0].device)
    sizes = [*item_sizes(layout, len(padded)), tuple(padded)]
    batches = []
    for tensor, extent in zip(tensors, extents, strict=True):
        sizes_here = extent.padded(sizes)
        if sizes_here is None:
            batches.append(tensor.clone(memory_format=torch.contiguous_format) if copies else tensor)
        else:
            *each, most = sizes_here
            batches.append(pad_rows(tensor, each, most, gather_indices, copies).flatten(1, len(most)))
    return batches


def flatten(output: Any, declared: Declared) -> Parts:
    """Flatten an output to its tensors.

    Args:
        output: Tensors in tuples, lists, mappings, dataclasses, `ModelOutput`s, and Python values.
        declared: Declaration of the output.

    Raises:
        SpecError: The declaration does not match the output, or the output holds an unsupported object or a tensor
            that is sharded over ranks.
    """
    parts = Parts([], [], [], [], [], rebuild=lambda tensors: None)
    parts.rebuild = _visit(output, declared, (), parts)
    return parts


def at(output: Any, path: Path) -> Any:
    """Return the value at a path of an output, or `None` if there is none."""
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
    """Format a path of an output for messages."""
    return "output" + "".join(f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in path)


def _visit(part: Any, declared: Declared | None, path: Path, parts: Parts) -> Rebuild:
    if isinstance(part, Tensor):
        if not isinstance(declared, Extent):
            raise SpecError(
                f"{name_of(path)} is a tensor but is declared as {declared!r}: expected Rows(...), Items(...) or "
                "Entries(...)"
            )
        if part.is_nested or part.layout is not torch.strided or part.is_meta:
            if part.is_meta:
                raise SpecError(f"{name_of(path)} is a meta tensor: expected one with values")
            raise SpecError(
                f"{name_of(path)} is a sparse or nested tensor: expected a dense one; try {name_of(path)}.to_dense()"
            )
        parts.tensors.append(require_replicated(part, name_of(path)))
        parts.extents.append(declared)
        parts.paths.append(path)
        return operator.itemgetter(len(parts.tensors) - 1)
    if isinstance(part, CONSTANTS):
        parts.constants.append(part)
        if declared is not None:
            parts.values[path] = part
        return lambda tensors: part
    assert declared is not None  # noqa: S101 - fields may leave out Python values alone
    kind = type(part)  # the closures below must not hold `part`: they outlive its tensors
    parts.containers.append(kind)
    if dataclasses.is_dataclass(part) and not isinstance(part, tuple | list):
        fields = _attributes(part)
        makes = _visit_fields(fields, declared, path, parts)
        construct = _constructor(part, fields)
        _check_rebuilt(part, construct, fields, path)
        return lambda tensors: construct({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, Mapping):
        makes = _visit_fields(part, declared, path, parts)
        _check_rebuilt(part, kind, dict(part.items()), path)
        return lambda tensors: kind({name: make(tensors) for name, make in makes.items()})
    if isinstance(part, tuple | list):
        each = [declared] * len(part) if isinstance(declared, Extent) else declared
        if isinstance(each, Fields | Mapping) or len(each) != len(part):
            raise SpecError(
                f"{name_of(path)} has {len(part)} parts but is declared as {declared!r}: expected one declaration for "
                "each part, in a tuple or list"
            )
        entries = [_visit(p, d, (*path, i), parts) for i, (p, d) in enumerate(zip(part, each, strict=True))]
        named = hasattr(part, "_fields")
        _check_rebuilt(part, (lambda values: kind(*values)) if named else kind, list(part), path)
        if named:
            return lambda tensors: kind(*(make(tensors) for make in entries))
        if kind in (tuple, list) and all(isinstance(own, Tensor) for own in part):
            end = len(parts.tensors)  # a slice, because a function for each tensor costs a call each
            return lambda tensors: kind(tensors[end - len(entries) : end])
        return lambda tensors: kind(make(tensors) for make in entries)
    raise SpecError(
        f"{name_of(path)} has type {kind.__name__}, which may hide tensors: expected tensors, Python values, and "
        "tuples, lists, mappings and dataclasses of them; return these, or pass forward= with a function that does"
    )


def _attributes(part: Any) -> dict[str, Any]:
    """Return the attributes of an object, the fields of a dataclass first and in order."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = {field.name: getattr(part, field.name) for field in fields if hasattr(part, field.name)}
    return values | getattr(part, "__dict__", {})


def _constructor(part: Any, attributes: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that builds a dataclass like `part` from its attributes.

    It bypasses the constructor, whose `__post_init__` may change values and has already run once. If the dataclass is
    also a dict, as a `ModelOutput` is, its entries are set from the attributes of the same names.
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
            vars(made).update(values)  # faster than setattr one by one
        for name in entries:
            set_entry(made, name, values[name])
        return made

    return construct


def _check_rebuilt(part: Any, construct: Callable[[Any], Any], values: Any, path: Path) -> None:
    """Check that an object rebuilt from its own values has the same contents.

    Raises:
        SpecError: The object cannot be rebuilt, or rebuilding loses or changes contents.
    """
    kind = type(part)
    if kind in (dict, list, tuple):
        return
    try:
        # Rebuilt from the same objects, so that == stops at identity and does not compare tensors.
        alike, why = _contents(construct(values)) == _contents(part), "rebuilding loses or changes contents"
    except Exception as error:  # raised by a constructor, or by == between other objects
        alike, why = False, f"{type(error).__name__}: {error}"
    if not alike:
        raise SpecError(
            f"{name_of(path)} is a {kind.__name__} with attributes {list(_attributes(part))}, which cannot be rebuilt "
            f"from its parts ({why}): expected only fields of a dataclass or entries of a mapping, list or tuple; "
            "return a plain one, or pass forward= with a function that does"
        )


def _contents(part: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the entries and attributes of an object."""
    entries = part.items() if isinstance(part, Mapping) else part if isinstance(part, tuple | list) else ()
    return [*entries], _attributes(part)


def _visit_fields(fields: Mapping[Any, Any], declared: Declared, path: Path, parts: Parts) -> dict[Any, Rebuild]:
    if not isinstance(declared, Extent | Fields | Mapping):
        raise SpecError(
            f"{name_of(path)} has fields {list(fields)} but is declared as {declared!r}: expected Fields(...)"
        )
    each = dict.fromkeys(fields, declared) if isinstance(declared, Extent) else named(declared)
    unknown = [name for name in each if name not in fields and name != HIDDEN_STATES]
    missing = [name for name in fields if name not in each and not isinstance(fields[name], CONSTANTS)]
    if unknown or missing:
        raise SpecError(
            f"{name_of(path)} has fields {list(fields)}; undeclared: {missing or 'none'}; declared but absent: "
            f"{unknown or 'none'}; expected one declaration for each field that is not a Python value, as in "
            "Fields(name=Rows())"
        )
    return {name: _visit(field, each.get(name), (*path, name), parts) for name, field in fields.items()}
