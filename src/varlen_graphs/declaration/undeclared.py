"""Suggest the declaration of a tensor that a call brings and nothing declares, for messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varlen_graphs.declaration.buffer_spec import BufferSpec


def declaration_of(spec: BufferSpec, name: str, value: Any, rows: Sequence[int], description: Mapping[str, Any]) -> str:
    """Return the declaration that an undeclared argument seems to need.

    Args:
        spec: The declaration so far.
        name: Name of the argument.
        value: What came: a tensor, or something that holds one.
        rows: Shape of the rows; empty if it is not known.
        description: The arguments that describe the items, by name.
    """
    if not isinstance(value, Tensor):
        return "the tensors in it as arguments of their own, by inputs=[...] of the BufferSpec"
    dims, items = len(spec.rows_form.dims), _length(description.get(spec.layout.name))
    shape = tuple(value.shape)
    kind, rest = "PerCall", shape
    if shape and rows and shape[:dims] == tuple(rows[:dims]):
        kind, rest = "PerItem" if spec.rows_form.by_item else "PerRow", shape[dims:]
    elif shape and shape[0] == items:
        kind, rest = "PerItem", shape[1:]
    own = "" if value.dtype.is_floating_point else f", dtype={value.dtype}"
    return f"inputs=[vg.inputs.{kind}({name!r}, {rest}{own})] in the BufferSpec"


def _length(value: Any) -> int:
    """Return the number of items that a description has; -1 if it does not tell."""
    try:
        return len(value)
    except TypeError:
        return -1
