"""Static arguments: values that cannot change, in a form in which those that are not alike differ."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import Any

import torch

StaticKey = tuple[tuple[str, Any], ...]
"""Names and forms of static arguments: the key by which graphs are kept."""

_JSON = {NoneType, bool, int, float, str}
_COMPARED = {
    *_JSON, bytes, Fraction, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
_WITH_VALUE = (str, bytes, int, float, complex, tuple, frozenset)
"""Types whose subclasses hold a value beside their fields."""

_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType)


class ChangeableError(TypeError):
    """A value may change while the graphs that were captured for it do not; `kind` is its type, or that of a part."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.kind = kind


def static_form(value: Any) -> tuple[Any, ...]:
    """Return a value as types and parts, by which 1, 1.0 and True differ, 0.0 and -0.0 too, and NaN equals NaN.

    Raises:
        ChangeableError: The value is none of those that cannot change: numbers, strings, `None`, enums, dtypes,
            devices, functions, types and the like, and tuples, frozen sets and frozen dataclasses of these.
    """
    kind = type(value)
    if kind is float and (value == 0 or value != value):
        return kind, repr(value)  # which tells 0.0 and -0.0 apart, and is the same for each NaN
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type | None):
        raise ChangeableError(kind)  # a method of an object
    if kind in _COMPARED or isinstance(value, _BY_IDENTITY):
        return kind, value
    if kind is Decimal:
        return kind, *value.as_tuple()
    if kind is range:
        return kind, value.start, value.stop, value.step
    if kind is complex:
        return kind, static_form(value.real), static_form(value.imag)
    if isinstance(value, Enum):
        return kind, value.value if isinstance(value, Flag) else value.name
    if is_dataclass(kind) and not issubclass(kind, _WITH_VALUE) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        if not getattr(value, "__dict__", {}).keys() <= {field.name for field in fields(value)}:
            raise ChangeableError(kind)  # attributes that `__post_init__` or a subclass adds
        return kind, *[(field.name, static_form(getattr(value, field.name))) for field in fields(value)]
    if getattr(value, "__dict__", None):
        raise ChangeableError(kind)
    if isinstance(value, tuple):
        return kind, *map(static_form, value)
    if isinstance(value, frozenset):
        return kind, *map(static_form, value)  # in its order, which a module may go through
    if isinstance(value, PurePath):
        return kind, str(value)  # paths of Windows are equal in any case
    if isinstance(value, str | bytes):
        return kind, value
    if isinstance(value, Number) and kind.__module__ == "numpy":
        return kind, repr(value)
    raise ChangeableError(kind)


def static_key(static_args: Mapping[str, Any]) -> StaticKey:
    """Return static arguments as a key.

    Raises:
        ChangeableError: One of them may change.
    """
    return tuple([(name, static_form(static_args[name])) for name in sorted(static_args)])


def json_static_args(key: StaticKey) -> dict[str, Any] | None:
    """Return the static arguments of a key; `None` if JSON does not preserve them."""
    if any(form[0] not in _JSON or form == (float, "nan") for _, form in key):
        return None
    return {name: float(value) if kind is float else value for name, (kind, value) in key}


def alike(value: Any, other: Any) -> bool:
    """Return True if two values, or what two lists or dicts hold, are the same in type, value and order."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) in (list, tuple):  # subclasses may hold more than their entries
        return len(value) == len(other) and all(map(alike, value, other))
    if type(value) is dict:
        return len(value) == len(other) and all(map(alike, value.items(), other.items()))
    try:
        return static_form(value) == static_form(other)
    except ChangeableError:
        return False
