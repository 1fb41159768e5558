"""Write files atomically, and check numbers read from them."""

import os
import reprlib
import secrets
import sys
from pathlib import Path

from varlen_graphs.errors import InputError


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


def integer(what: str, value: object, *, zero: bool = False) -> int:
    """Check that a value from a file is an integer of at least 1, or 0 with `zero`; raise `InputError` if not."""
    least = 0 if zero else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{what} is {reprlib.repr(value)}: expected an integer of at least {least}")
    return value


def number(what: str, value: object, *, zero: bool = False) -> float:
    """Check that a value from a file is a finite number above 0, or 0 with `zero`; raise `InputError` if not."""
    least = 0.0 if zero else sys.float_info.min
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= sys.float_info.max:
        limit = "of at least 0" if zero else "above 0"
        raise InputError(f"{what} is {reprlib.repr(value)}: expected a finite number {limit}")
    return value
