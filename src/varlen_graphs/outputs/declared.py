"""Declarations of outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from varlen_graphs.errors import SpecError
from varlen_graphs.outputs.entries import Extent

HIDDEN_STATES = "hidden_states"
"""The field that an output may lack though it is declared: modules return it in calls that ask for it."""


class Fields:
    """Declarations for an output with named fields: a dataclass, a `ModelOutput`, or a dict.

    Example: `Fields(last_hidden_state=Rows(), pooler_output=Rows(every=4))`. A dict of declarations is equivalent, and
    its keys may be any hashable values. Of the declared fields, only `hidden_states` may be missing in an output: see
    docs/buffers.md.
    """

    def __init__(self, /, **fields: "Declared") -> None:  # a field may have any name, even `self`
        self.fields = fields

    def __repr__(self) -> str:
        return f"Fields({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


Declared = Extent | Fields | Mapping[Any, "Declared"] | Sequence["Declared"]
"""Declaration of an output: one `Extent` for all tensors in it, or one declaration per part."""


def each_extent(declared: Declared, change: Callable[[Extent], Extent]) -> Declared:
    """Return the declaration with every extent changed."""
    if isinstance(declared, Extent):
        return change(declared)
    if isinstance(declared, Fields | Mapping):
        return {name: each_extent(part, change) for name, part in named(declared).items()}
    return [each_extent(part, change) for part in declared]


def extents(declared: Declared) -> list[Extent]:
    """Return all extents in a declaration.

    Raises:
        SpecError: `declared`, or a part of it, is not a declaration.
    """
    if isinstance(declared, Extent):
        return [declared]
    if isinstance(declared, str) or not isinstance(declared, Fields | Mapping | Sequence):
        raise SpecError(
            f"{declared!r} does not declare an output: expected an instance of Rows, Items, Groups, Entries or "
            "FrameRows of vg.outputs, such as vg.outputs.Rows(), or a dict, vg.outputs.Fields(...), tuple or list "
            "of these"
        )
    parts: Iterable[Declared] = declared if isinstance(declared, Sequence) else named(declared).values()
    return [extent for part in parts for extent in extents(part)]


def named(declared: Fields | Mapping[Any, Declared]) -> Mapping[Any, Declared]:
    """Return the declarations of the fields of an output."""
    return declared.fields if isinstance(declared, Fields) else declared
