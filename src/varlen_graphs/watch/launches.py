"""Interception of Triton launches that do not go through a torch operator."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def intercept_triton_launches(
    on_launch: Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Run every Triton launch, on any thread, inside `on_launch(kernel, args, kwargs)`; `kwargs` includes the grid."""
    classes = []
    if "triton" in sys.modules:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        classes = [InterpretedFunction, JITFunction]
    originals = [cls.run for cls in classes]

    def intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with on_launch(self, args, kwargs):
                return original(self, *args, **kwargs)

        return run

    for cls, original in zip(classes, originals, strict=True):
        cls.run = intercepted(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.run = original
