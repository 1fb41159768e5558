"""A forward under `torch.compile`, compiled once for any number of rows."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import CaptureError


class CompiledForward:
    """Compiles a function at one budget, with dynamic shapes, and refuses to recompile it for another.

    The compiler only fuses; shapes and graphs are handled by this library. Budgets of one item are compiled apart: the
    compiler takes a size of 1 for a constant. Other static arguments, or weights of another dtype, are compiled at the
    first budget of each set of graphs.

    Args:
        function: The function to compile.
        backend: Backend of `torch.compile`.

    Attributes:
        seconds: Time that compilation took; `None` before the first call.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor") -> None:
        self._function = torch.compile(function, dynamic=True, backend=backend)
        self._compiled_at: dict[bool, Budget] = {}  # by whether it holds one item
        self.seconds: float | None = None

    def __call__(self, budget: Budget, /, **arguments: Any) -> Any:
        """Run the function.

        Args:
            budget: Budget of the arguments. The first call sets the budget to compile at.
            **arguments: Arguments of the function.

        Raises:
            CaptureError: The function would have to be recompiled, because something in it depends on the budget.
        """
        import torch._dynamo.config as dynamo_config  # here, because the compiler imports triton
        import torch.fx.experimental._config as shape_config
        from torch._dynamo.exc import RecompileError

        compile_at = self._compiled_at.get(budget.items == 1, budget)
        # The number of rows may equal the number of channels by chance, and must not become the same symbol (duck
        # shapes). Floats stay constants. All encoders of a process share the frame compiled here, and torch would give
        # up after a few recompilations of one frame, so the limits are lifted.
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
                why = " ".join(str(error).partition("- User stack trace")[0].split())
                raise CaptureError(
                    f"compile=True would recompile for each budget, because of {why}: expected code that does not "
                    "depend on the budget; omit compile=True, or compute what depends on the budget in a buffer"
                ) from error
        self._compiled_at[budget.items == 1] = compile_at
        if self.seconds is None:
            self.seconds = time.perf_counter() - start
        return output
