"""Torch modes that concern the calling thread alone, and that no interrupt leaves behind."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
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


class RunMode(ThreadDispatchMode):
    """Dispatch mode for `run_under`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would switch its compiler off at each operator, which `run_under` does once."""
        return False


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
    operations: tuple[Any, ...]
    functions: tuple[Any, ...]
    tracing: Any
    listener: Listener | None

    @classmethod
    def now(cls) -> "ThreadState":
        """Return the present state."""
        tracing, listener = _guards.TracingContext.try_get(), LISTENER.get()
        return cls(torch.is_grad_enabled(), _operations(), _functions(), tracing, listener)

    def restore(self) -> None:
        """Set them as they were: modes that were entered since end here, and those are back that torch had set aside.

        Torch pops a mode while that handles an operation, and an interrupt may come before it is pushed again.
        """
        if _operations() != self.operations:
            for _ in _operations():
                _C._pop_torch_dispatch_stack(None)
            for mode in self.operations:
                _C._push_on_torch_dispatch_stack(mode)
        if _functions() != self.functions:
            for _ in _functions():
                _C._pop_torch_function_stack()
            for mode in self.functions:
                _C._push_on_torch_function_stack(mode)
        _guards._TLS.tracing_context = self.tracing
        LISTENER.set(self.listener)
        torch.set_grad_enabled(self.grad)


def _operations() -> tuple[Any, ...]:
    """Return the dispatch modes, the innermost last."""
    return tuple([_C._get_dispatch_stack_at(at) for at in range(_C._len_torch_dispatch_stack())])


def _functions() -> tuple[Any, ...]:
    """Return the torch function modes, the innermost last."""
    return tuple([_C._get_function_stack_at(at) for at in range(_C._len_torch_function_stack())])


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Run operations of this thread that no torch mode sees."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


def close_interrupted(error: BaseException) -> None:
    """End context managers made of generators that an interrupt stopped while they were entered or left.

    They would end with the traceback, at any time, and then push a mode that they had taken from its stack.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in _ENTER_AND_EXIT:
            frame.f_locals["self"].gen.close()


_Manager = contextlib._GeneratorContextManager
_ENTER_AND_EXIT = (_Manager.__enter__.__code__, _Manager.__exit__.__code__)


def run_under(
    run: Callable[[], Result],
    operations: RunMode,
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
        except BaseException as error:
            close_interrupted(error)
            raise
        finally:
            before.restore()
    finally:  # an interrupt may have ended the first
        before.restore()
