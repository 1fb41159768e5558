"""The doctor on the command line."""

import importlib
import os
import sys
from typing import Any

from torch import nn

from varlen_graphs.doctor.diagnose import diagnose
from varlen_graphs.watch.lines import UNKNOWN, raising_line


class FactoryError(Exception):
    """There is no such factory, it raises, or it returns something else than a module and calls."""


def run_doctor(factory: str, as_json: bool) -> int:
    """Look at what a factory makes, and print what was found; in colour on a terminal, unless `NO_COLOR` is set.

    Args:
        factory: `package.module:function`, which takes no arguments and returns `module, call, call, ...`.
        as_json: Whether to print JSON.

    Returns:
        0 if nothing stands in the way of a graph, else 1.

    Raises:
        FactoryError: Of the factory's name, or of what it returns.
    """
    module, calls = _made(factory)
    diagnosis = diagnose(module, *calls)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(diagnosis.to_json() if as_json else diagnosis.text(color))
    return 0 if diagnosis.ok else 1


def _made(factory: str) -> tuple[nn.Module, tuple[Any, ...]]:
    place, _, name = factory.partition(":")
    if not place or not name:
        raise FactoryError(f"{factory!r} names no factory: expected package.module:function")
    try:
        function = getattr(importlib.import_module(place), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise FactoryError(
            f"{factory!r} cannot be found ({error}): run from where {place!r} can be imported"
        ) from error
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{place!r} cannot be imported: {_told(error)}") from error
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{factory!r} cannot be called without arguments: {_told(error)}") from error
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], nn.Module):
        raise FactoryError(f"{factory!r} returned {type(made).__name__}: expected a tuple (module, call, call, ...)")
    return made[0], made[1:]


def _told(error: BaseException) -> str:
    line = raising_line(error.__traceback__)
    return f"{type(error).__name__}: {error}" + (f"\n  at {line}" if line != UNKNOWN else "")
