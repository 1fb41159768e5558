"""One call: its arguments, sorted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from varlen_graphs.layout.items import Layout

StaticKey = tuple[tuple[str, Any], ...]
"""Static arguments as a key, by which graphs are kept."""


@dataclass(slots=True)
class Call:
    """The arguments of one call, sorted.

    Attributes:
        rows: The rows, packed `[rows, ...]` (a view, where the argument has its rows in another dimension), or
            `[batch, length, ...]`.
        description: The arguments that describe the items, by name: the layout argument first, then the columns
            (`None` where absent) and the mask of a batch to pack.
        statics: Other arguments, for which graphs are captured; arguments equal to their default are left out.
        key: `statics` as a key.
        original: All arguments by name, as the caller passed them; empty where `rows` are a part of the caller's.
        beyond: Reason why only the original module can answer this call; `None` if graphs can.
        layout: The items; `None` while only the GPU has seen them.
        length: Padded length of a batch that was packed on its way in; 0 for other calls.
        staged: True if `rows` already lie in the arena, where the caller wrote them.
    """

    rows: Tensor
    description: dict[str, Any]
    statics: dict[str, Any]
    key: StaticKey
    original: dict[str, Any]
    beyond: str | None
    layout: Layout | None = None
    length: int = 0
    staged: bool = False

    @property
    def items(self) -> int:
        """Number of items. A description that only the GPU has seen is a tensor with an entry an item."""
        return len(next(iter(self.description.values())) if self.layout is None else self.layout)


def static_key(statics: Mapping[str, Any]) -> StaticKey:
    """Return static arguments as a key. Types are part of it, because 1 == 1.0 == True."""
    return tuple((name, typed(statics[name])) for name in sorted(statics))


def statics_of(key: StaticKey) -> dict[str, Any]:
    """Return the static arguments of a key."""
    return {name: value for name, (_, value) in key}


def typed(value: Any) -> tuple[Any, Any]:
    """Return a value with its types, so that values equal in Python but not alike compare as different."""
    return _types(value), value


def _types(value: Any) -> Any:
    """Return the types of a value and of all it contains, and the signs of zeros: where equal values may differ."""
    kind = type(value)
    if isinstance(value, tuple):
        return (kind, *map(_types, value))
    if isinstance(value, frozenset):
        return kind, frozenset((one, _types(one)) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return (kind, *(_types(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, float) and value == 0:
        return kind, math.copysign(1, value)
    return kind
