"""Warnings that name the line of the user."""

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
