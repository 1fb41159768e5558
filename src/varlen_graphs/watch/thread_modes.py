"""Torch modes that concern the calling thread alone, and that no interrupt leaves behind."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import _C, _guards
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from varlen_graphs.watch.launches import LISTENER, Listener, listen_to_triton

Result = TypeVar("Result")


class ThreadDispatchMode(TorchDispatchMode):
    """Dispatch mode of the calling thread alone.

    Torch's own `__enter__` also sets flags of the process. While they are set, other threads do not compile, and the
    code that they skip is never compiled; two modes that overlap leave them set.
    """

    def __enter__(self) -> Any:
        """Push the mode."""
        _C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Pop the mode."""
        _C._pop_torch_dispatch_stack(None)


class _NoCompiler(SimpleNamespace):
    """What `torch.compile` takes for a fake mode whose kernel is running: it calls the original function then.

    It is false, so that others, which look for a fake mode to use, make their own.
    """

    in_kernel_invocation = True

    def __bool__(self) -> bool:
        return False


class ThreadState(NamedTuple):
    """The torch modes of this thread."""

    grad: bool
    operations: int
    functions: int
    tracing: Any
    listener: Listener | None

    @classmethod
    def now(cls) -> "ThreadState":
        """Return the present state."""
        tracing, listener = _guards.TracingContext.try_get(), LISTENER.get()
        depths = _C._len_torch_dispatch_stack(), _C._len_torch_function_stack()
        return cls(torch.is_grad_enabled(), *depths, tracing, listener)

    def restore(self) -> None:
        """Set them as they were; modes that were entered since end here."""
        while _C._len_torch_dispatch_stack() > self.operations:
            _C._pop_torch_dispatch_stack(None)
        while _C._len_torch_function_stack() > self.functions:
            _C._pop_torch_function_stack()
        _guards._TLS.tracing_context = self.tracing
        LISTENER.set(self.listener)
        torch.set_grad_enabled(self.grad)


def run_under(
    run: Callable[[], Result],
    operations: ThreadDispatchMode,
    functions: TorchFunctionMode | None = None,
    listener: Listener | None = None,
) -> Result:
    """Call a function in this thread under modes, without gradients, and with code under `torch.compile` uncompiled.

    A dispatch mode sees nothing of compiled code, and the compiler would skip, for good, code that it meets under one.

    Args:
        run: The function.
        operations: Sees the operators.
        functions: Sees the torch functions.
        listener: Sees the launches of Triton kernels, see `watch/launches.py`.
    """
    before = ThreadState.now()
    try:
        try:
            torch.set_grad_enabled(False)
            _guards._TLS.tracing_context = _guards.TracingContext(_NoCompiler())  # type: ignore[arg-type]
            if listener is not None:
                listen_to_triton()
            LISTENER.set(listener)
            if functions is not None:
                functions.__enter__()
            with operations:
                return run()
        finally:
            before.restore()
    finally:  # an interrupt may have ended the first
        before.restore()
