"""Files for the next start: written as a whole, and checked as they are read."""

import os
import reprlib
import secrets
import sys
from pathlib import Path

from varlen_graphs.errors import InputError


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in place of what is there, only once it is whole: readers find the old one or the new one.

    Several processes and threads may write the same one: each has an unfinished file of its own beside it, and the last
    one to finish stays.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:  # an interrupt leaves nothing behind either
        unfinished.unlink(missing_ok=True)
        raise


def integer(what: str, value: object, *, zero: bool = False) -> int:
    """A number out of a file that counts something: an integer of at least 1, or of 0 where that is meant.

    Raises:
        InputError: It is something else.
    """
    least = 0 if zero else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{what} is {reprlib.repr(value)}: expected an integer of at least {least}")
    return value


def number(what: str, value: object, *, zero: bool = False) -> float:
    """A number out of a file that was measured: a finite one above 0, or 0 where that is meant.

    Raises:
        InputError: It is something else.
    """
    least = 0.0 if zero else sys.float_info.min
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= sys.float_info.max:
        limit = "of at least 0" if zero else "above 0"
        raise InputError(f"{what} is {reprlib.repr(value)}: expected a finite number {limit}")
    return value
