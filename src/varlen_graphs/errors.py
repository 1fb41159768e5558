"""What can go wrong, one class for each kind of mistake.

Every message says what came, what was expected and what to try.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (*(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)), contextlib.__file__)


def warn(message: str) -> None:
    """Warn of what the innermost line outside of this package, and of torch, led to."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class VarlenGraphsError(Exception):
    """Base of every error this library raises on purpose."""


class SpecError(VarlenGraphsError, ValueError):
    """A declaration that cannot work: a buffer spec, an output declaration, a recipe on the wrong module."""


class BudgetError(VarlenGraphsError, ValueError):
    """A budget or ladder no item could use, or a call that no budget holds where eager is not allowed."""


class LayoutError(VarlenGraphsError, ValueError):
    """Items that make no sense, or that do not match the rows they came with."""


class InputError(VarlenGraphsError, ValueError):
    """An argument of a call: missing, unexpected, of the wrong shape, dtype or device."""


class CaptureError(VarlenGraphsError, RuntimeError):
    """Something in the module cannot be part of a graph."""


class StaleOutputError(VarlenGraphsError, RuntimeError):
    """A borrowed output that a later replay or capture may have overwritten."""


class StaleGraphError(VarlenGraphsError, RuntimeError):
    """Graphs that do not hold any more: memory that they read was moved or replaced, or the process was forked."""


class VerificationError(VarlenGraphsError, RuntimeError):
    """Graphs give something else than the module does, or what they give depends on what padding holds."""


class RankError(VarlenGraphsError, RuntimeError):
    """Another rank of a group could not do its part of a call, or took part no more."""
