"""What recipes ask of a tower before they declare it."""

import sys
from collections.abc import Sequence
from typing import Any

from varlen_graphs.errors import SpecError


def check_parts(tower: object, parts: Sequence[str], expected: str) -> None:
    """Whether a tower has what a recipe calls by name.

    Raises:
        SpecError: It has not; says what was `expected`.
    """
    missing = [name for name in parts if not hasattr(tower, name)]
    if missing:
        raise SpecError(f"{type(tower).__name__} has no {missing}: expected {expected}")


def output_class(tower: object, *names: str) -> Any:
    """The first of these classes that the tower's own file knows, or `None`: versions of transformers differ in it.

    A class derived from the tower's may live elsewhere, so the files of its bases count too.
    """
    modules = [sys.modules[cls.__module__] for cls in type(tower).__mro__]
    return next((getattr(module, name) for module in modules for name in names if hasattr(module, name)), None)
