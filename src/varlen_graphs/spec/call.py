"""The arguments of one call, sorted, and the key of its static ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

StaticKey = tuple[tuple[str, Any], ...]


def static_key(statics: Mapping[str, Any]) -> StaticKey:
    """What graphs are kept by. Types are part of it, because 1 == 1.0 == True."""
    return tuple((name, _typed(statics[name])) for name in sorted(statics))


def statics_of(key: StaticKey) -> dict[str, Any]:
    """The static arguments of a key."""
    return {name: value for name, (_, value) in key}


def _typed(value: Any) -> tuple[Any, Any]:
    return _types(value), value


def _types(value: Any) -> Any:
    """The types of a value and of all that is in it, and the signs of zeros: what equal values may differ in."""
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


@dataclass(slots=True)
class Call:
    """One call, its arguments sorted.

    Attributes:
        rows: The rows, packed `[rows, ...]` (a view, where the argument has its rows in another dimension), or
            `[batch, length, ...]`.
        description: What describes the items, as it came, by name: the layout argument, the columns (`None` for those
            that did not come), and the mask of a batch to pack.
        statics: Other arguments, part of what graphs are captured for; those equal to their default are left out.
        original: All arguments as they came, by name; empty where the rows are a part of those that came.
        beyond: Why only the original module can answer this call, if so.
        length: To how many rows the items of a batch were padded that `rows` were packed from; 0 where they were not.
    """

    rows: Tensor
    description: dict[str, Any]
    statics: dict[str, Any]
    original: dict[str, Any]
    beyond: str | None
    length: int = 0

    @property
    def items(self) -> int:
        """How many items there are, of a description by tensors."""
        return len(next(iter(self.description.values())))
