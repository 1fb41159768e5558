"""Launches of Triton kernels that no operator of torch announces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def triton_launches(
    launching: Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Launch within `launching(kernel, args, kwargs)`, whatever thread it is; `kwargs` has the grid."""
    classes = []
    if "triton" in sys.modules:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        classes = [InterpretedFunction, JITFunction]
    originals = [cls.run for cls in classes]

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with launching(self, args, kwargs):
                return original(self, *args, **kwargs)

        return run

    for cls, original in zip(classes, originals, strict=True):
        cls.run = told(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.run = original
