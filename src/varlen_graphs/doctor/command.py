"""Command line of the doctor."""

import importlib
import os
import sys
from typing import Any

from torch import nn

from varlen_graphs.doctor.diagnose import diagnose
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, raising_line


class FactoryError(Exception):
    """The factory does not exist, raises, or returns something other than a module and calls."""


def run_doctor(factory: str, as_json: bool) -> int:
    """Diagnose what the factory `package.module:function` returns, and print the findings; return 1 if one blocks."""
    module, calls = _load(factory)
    diagnosis = diagnose(module, *calls)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(diagnosis.to_json() if as_json else diagnosis.text(color))
    return 0 if diagnosis.ok else 1


def _load(factory: str) -> tuple[nn.Module, tuple[Any, ...]]:
    place, _, name = factory.partition(":")
    if not place or not name:
        raise FactoryError(f"{factory!r} does not name a factory: expected package.module:function")
    try:
        function = getattr(importlib.import_module(place), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise FactoryError(
            f"{factory!r} cannot be found ({error}): run from a directory from which {place!r} can be imported"
        ) from error
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{place!r} cannot be imported: {_describe_error(error)}") from error
    try:
        made = function()
    except (Exception, SystemExit) as error:
        called = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        what = "raised an error" if called else "cannot be called without arguments"
        raise FactoryError(f"{factory!r} {what}: {_describe_error(error)}") from error
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], nn.Module):
        raise FactoryError(f"{factory!r} returned {type(made).__name__}: expected a tuple (module, call, call, ...)")
    return made[0], made[1:]


def _describe_error(error: BaseException) -> str:
    line = raising_line(error.__traceback__)
    return f"{type(error).__name__}: {error}" + (f"\n  at {line}" if line != UNKNOWN_LINE else "")
