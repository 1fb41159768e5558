"""Errors, one class for each kind of mistake.

Every message names what was passed or found, what was expected, and what to try.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

__all__ = [
    "BudgetError",
    "CaptureError",
    "CompilerError",
    "InputError",
    "LayoutError",
    "RankError",
    "SpecError",
    "StaleGraphError",
    "VarlenGraphsError",
    "VerificationError",
]

_INSIDE = (*(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)), contextlib.__file__)


def warn(message: str) -> None:
    """Warn, with the innermost frame outside of this package and of torch as the location."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 call", "2 calls"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class VarlenGraphsError(Exception):
    """Base class of the errors that this library raises."""


class SpecError(VarlenGraphsError, ValueError):
    """A declaration or an option is invalid: a buffer spec, an output declaration, a recipe on the wrong module."""


class BudgetError(VarlenGraphsError, ValueError):
    """A budget or ladder is invalid, or no budget holds an item while `on_miss="error"`."""


class LayoutError(VarlenGraphsError, ValueError):
    """The items of a call are invalid, or do not match its rows."""


class InputError(VarlenGraphsError, ValueError):
    """An argument is missing or unexpected, or has the wrong type, shape, dtype or device."""


class CaptureError(VarlenGraphsError, RuntimeError):
    """The module cannot be captured as a graph."""


class CompilerError(VarlenGraphsError, RuntimeError):
    """A kernel is not in Triton's cache, and this machine cannot build it."""


class StaleGraphError(VarlenGraphsError, RuntimeError):
    """The graphs are stale: memory that they read was moved or replaced, or the process was forked."""


class VerificationError(VarlenGraphsError, RuntimeError):
    """The output of a graph differs from that of the module, or depends on the contents of padding."""


class RankError(VarlenGraphsError, RuntimeError):
    """Another rank of the group failed in a call, made a different call, or no longer takes part."""
