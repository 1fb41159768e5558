"""Check the fields of a declaration against their annotations, when it is made and not at some later call."""

import dataclasses
import functools
import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from varlen_graphs.checks.values import INT64_MAX, quoted
from varlen_graphs.errors import SpecError

_NAMES = {
    int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None",
    torch.dtype: "a torch.dtype", Tensor: "a tensor",
}  # fmt: skip


def check_fields(declaration: Any, error: type[Exception] = SpecError) -> None:
    """Check that each field of a dataclass has a value of its annotated type; lists become tuples where these do.

    Raises:
        SpecError: A field has another value; or `error`, if given.
    """
    for name, hint in _hints(declaration.__class__):
        value = getattr(declaration, name)
        if not _fits(value, hint):
            raise error(f"{type(declaration).__name__}({name}={quoted(value)}): expected {_described(hint)}")
        if isinstance(value, list):  # a frozen dataclass is hashed by its fields
            object.__setattr__(declaration, name, tuple(value))


def is_integer(value: Any) -> bool:
    """Return True for integers of 64 bits, those of NumPy too, but not for True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= INT64_MAX


def check_at_least(declaration: Any, least: int, *names: str, error: type[Exception] = SpecError) -> None:
    """Check that integer fields of a declaration are not below `least`."""
    for name in names:
        value = getattr(declaration, name)
        if not is_integer(value) or value < least:
            what = f"{type(declaration).__name__}({name}={quoted(value)})"
            raise error(f"{what}: expected an integer of at least {least}")


def check_pad(declaration: Any, dtype: torch.dtype, name: str = "pad") -> None:
    """Check that tensors of a dtype can hold the `pad`, or another value, of a declaration."""
    wanted = getattr(declaration, name)
    try:
        value = torch.full((), wanted, dtype=dtype, device="cpu").item()
        fits = dtype.is_floating_point or value == wanted
    except (RuntimeError, OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SpecError(
            f"{type(declaration).__name__}({declaration.name!r}, {name}={quoted(wanted)}): expected a value of {dtype}"
        )


@functools.cache
def _hints(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind) if field.init]


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is tuple:
        return isinstance(value, tuple | list) and all(_fits(one, parts[0]) for one in value)
    if kind is int:
        return is_integer(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _is_float(value)
    return isinstance(value, kind)


def _is_float(value: Real) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _described(hint: Any) -> str:
    *most, last = _alternatives(hint)
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(hint: Any) -> list[str]:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return [name for part in parts for name in _alternatives(part)]
    if kind is Literal:
        return [repr(part) for part in parts]
    if kind is tuple:
        return [f"a tuple with each entry {_described(parts[0])}"]
    name = kind.__name__
    return [_NAMES.get(kind) or ("a function" if name == "Callable" else f"a{'n' * (name[0] in 'AEIOU')} {name}")]
