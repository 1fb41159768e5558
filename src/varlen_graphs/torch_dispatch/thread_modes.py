"""Torch modes that concern the calling thread alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import _C, _guards
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from varlen_graphs.torch_dispatch.random_stream import RandomStream
from varlen_graphs.torch_dispatch.sharded import is_distributed_tensor

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
    """Dispatch mode for `run_under`. Subclasses handle operators on plain tensors in `run_operator`.

    Args:
        random: Gives random numbers to runs; `None` leaves them those of the process.

    Attributes:
        met_compiled: True if a run came to code under `torch.compile`, which ran uncompiled.
    """

    supports_higher_order_operators = True

    def __init__(self, random: RandomStream | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met_compiled = False
        self._random = random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle an operator, but not on the tensors of several ranks: on this rank's own it comes here in turn."""
        if any(map(is_distributed_tensor, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if self._random is not None:
            func, kwargs = self._random.run(func, args, kwargs)
        return self.run_operator(func, args, kwargs)

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would switch its compiler off at each operator, which `run_under` does once."""
        return False


class _OwnNumbers(RunMode):
    """Dispatch mode in which operators run as they are, but draw no random numbers of the process."""

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        return func(*args, **kwargs)


def run_aside(run: Callable[[], Result]) -> Result:
    """Call a function in this thread as `run_under` does, with random numbers of its own."""
    return run_under(run, _OwnNumbers(RandomStream()))


class _NoCompiler(SimpleNamespace):
    """What `torch.compile` takes for a fake mode whose kernel is running: it calls the original function then.

    It is false, so that others, which look for a fake mode to use, make their own.
    """

    shape_env = None
    asked = False

    @property
    def in_kernel_invocation(self) -> bool:
        self.asked = True
        return True

    def __bool__(self) -> bool:
        return False


@contextmanager
def unwatched() -> Iterator[None]:
    """Run operations of this thread that no torch mode sees."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


def run_under(
    run: Callable[[], Result],
    operations: RunMode,
    functions: TorchFunctionMode | None = None,
) -> Result:
    """Call a function in this thread under modes, without gradients, and with code under `torch.compile` uncompiled.

    A dispatch mode sees nothing of compiled code, and the compiler would skip, for good, code that it meets under one.

    Args:
        run: The function.
        operations: Sees the operators.
        functions: Sees the torch functions.
    """
    compiler = _NoCompiler()
    uncompiled = _guards.tracing(_guards.TracingContext(compiler))  # type: ignore[arg-type]
    try:
        with torch.no_grad(), uncompiled, functions or nullcontext(), operations:
            return run()
    finally:
        operations.met_compiled |= compiler.asked
