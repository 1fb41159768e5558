"""Checks of a tower that recipes make before they declare it."""

import sys
from collections.abc import Sequence
from typing import Any

from varlen_graphs.errors import SpecError


def check_parts(tower: object, parts: Sequence[str], expected: str) -> None:
    """Check that a tower has the submodules and attributes that a recipe uses by name.

    Args:
        tower: The tower.
        parts: Names of the attributes.
        expected: Description of the expected tower, for the error.

    Raises:
        SpecError: An attribute is missing.
    """
    missing = [name for name in parts if not hasattr(tower, name)]
    if missing:
        raise SpecError(f"{type(tower).__name__} has no {missing}: expected {expected}")


def output_class(tower: object, *names: str) -> Any:
    """Return the first of these classes that the tower's own file has, or `None`; versions of transformers differ.

    A subclass of the tower's class may live in another file, so the files of the base classes are searched too.
    """
    modules = [sys.modules[cls.__module__] for cls in type(tower).__mro__]
    return next((getattr(module, name) for module in modules for name in names if hasattr(module, name)), None)
