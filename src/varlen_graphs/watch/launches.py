"""Interception of Triton launches that do not go through a torch operator."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]]
"""Called as `listener(kernel, args, kwargs)`, where `kwargs` includes the grid; the launch runs inside its result."""

LISTENER: ContextVar[Listener | None] = ContextVar("LISTENER", default=None)
"""Listener of this thread."""


def listen_to_triton() -> None:
    """Let each Triton launch, from now on, run inside the listener of its thread, if there is one."""
    if "triton" in sys.modules:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        for cls in (InterpretedFunction, JITFunction):
            _intercept(cls)


@cache
def _intercept(cls: Any) -> None:
    # For good: to undo it would undo it for other threads that listen as well.
    original = cls.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = LISTENER.get()
        if listener is None:
            return original(self, *args, **kwargs)
        with listener(self, args, kwargs):
            return original(self, *args, **kwargs)

    cls.run = run
