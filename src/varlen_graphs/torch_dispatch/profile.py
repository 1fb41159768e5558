"""Follow the calls and returns of functions in this thread."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def profiled(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call a function as `sys.setprofile` does for what this thread runs; a profiler of the user's pauses meanwhile."""
    before: Any = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)
        if before is not None and not callable(before):  # a profiler of C, such as that of cProfile
            before.enable()
