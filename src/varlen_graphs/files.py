"""Write files atomically, and check numbers read from them."""

import os
import reprlib
import secrets
from pathlib import Path

from varlen_graphs.errors import InputError, VarlenGraphsError

DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, VarlenGraphsError)
"""Errors that reading a damaged JSON file may raise."""

INT64_MAX = 2**63 - 1

MOST, LEAST = 1e15, 1e-12
"""Range of numbers other than 0: sums and products of a few of them, and of 64-bit integers, stay finite."""


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically: readers see the old file or the new one, and the last of several writers wins."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:  # an interrupt leaves nothing behind either
        unfinished.unlink(missing_ok=True)
        raise


def integer(what: str, value: object, *, zero: bool = False, most: int = INT64_MAX) -> int:
    """Check that a value from a file is an integer from 1, or 0 with `zero`, to `most`; raise `InputError` if not."""
    least = 0 if zero else 1
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(
            f"{what} is {reprlib.repr(value)}: expected an integer of at least {least}, and at most {most}"
        )
    return value


def number(what: str, value: object, *, zero: bool = False) -> float:
    """Check that a value from a file is a number above 0, or 0 with `zero`, and finite; raise `InputError` if not."""
    least = 0.0 if zero else LEAST
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MOST:
        limit = "of at least 0" if zero else "above 0"
        raise InputError(f"{what} is {reprlib.repr(value)}: expected a finite number {limit}, and at most {MOST:.0e}")
    return float(value)
