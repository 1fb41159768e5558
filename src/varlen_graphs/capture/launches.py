"""Launches of Triton kernels that no operator of torch announces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def triton_launches(launched: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Call `launched(kernel, args, kwargs)` before each launch, of whatever thread; `kwargs` has the grid."""
    classes = []
    if "triton" in sys.modules:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        classes = [InterpretedFunction, JITFunction]
    originals = [cls.run for cls in classes]

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            launched(self, args, kwargs)
            return original(self, *args, **kwargs)

        return run

    for cls, original in zip(classes, originals, strict=True):
        cls.run = told(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.run = original
