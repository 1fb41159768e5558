"""A forward under torch's compiler: compiled once, for any number of rows."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from varlen_graphs.errors import CaptureError
from varlen_graphs.layout.budgets import Budget


class CompiledForward:
    """Compiles a function at one budget, with dynamic shapes, and refuses to compile it anew for another.

    What the compiler is good at is fusing; which shapes there are, and the graphs for them, are ours. Other static
    arguments, or weights of another dtype, are compiled where each set of graphs begins.

    Args:
        function: What to compile.
        backend: What torch's compiler hands its graphs to.

    Attributes:
        seconds: How long compiling took; `None` before the first call.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor") -> None:
        self._function = torch.compile(function, dynamic=True, backend=backend)
        self._compiled_at: Budget | None = None
        self.seconds: float | None = None

    def begin(self) -> None:
        """Compile at the budget of the next call, if that needs other code than there is."""
        self._compiled_at = None

    def __call__(self, budget: Budget, /, **arguments: Any) -> Any:
        """Run the function.

        Args:
            budget: What the arguments are for. That of the first call, or after `begin`, is the one to compile at.
            **arguments: The arguments.

        Raises:
            CaptureError: It would have to be compiled again: something in it depends on the budget.
        """
        import torch._dynamo.config as dynamo_config  # here, because the compiler imports triton
        import torch.fx.experimental._config as shape_config
        from torch._dynamo.exc import RecompileError

        compile_at = self._compiled_at or budget
        # Rows may happen to be as many as channels: that must not make them one size. And a constant is a constant. All
        # encoders of a process share one line of code here, and beyond some recompilations of it torch would give up.
        settings = {
            "specialize_float": True,
            "error_on_recompile": budget != compile_at,
            "recompile_limit": sys.maxsize,
            "accumulated_recompile_limit": sys.maxsize,
        }
        with dynamo_config.patch(settings), shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            start = time.perf_counter()
            try:
                output = self._function(**arguments)
            except RecompileError as error:
                raise CaptureError(
                    f"compile=True would compile once for each budget, because of {error}; leave it out, or compute "
                    "what depends on the budget in a buffer"
                ) from error
        self._compiled_at = compile_at
        if self.seconds is None:
            self.seconds = time.perf_counter() - start
        return output
