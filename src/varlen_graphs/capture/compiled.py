"""A forward under `torch.compile`, compiled once for any number of rows."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import CaptureError


class CompiledForward:
    """Compiles a function at one budget, with dynamic shapes, and refuses to recompile it for another.

    The compiler only fuses; shapes and graphs are handled by this library. What it makes of one block of a module
    serves all that are alike, so where the function runs all of its repeated blocks, they alone are compiled: this
    takes a fraction of the time. Budgets of one item are compiled apart: the compiler takes a size of 1 for a constant.
    Other static arguments, or weights of another dtype, are compiled at the first budget of each set of graphs.

    Args:
        function: The function to compile.
        module: The module that it runs, which nothing else runs meanwhile; `None` compiles the function as a whole.
        backend: Backend of `torch.compile`.

    Attributes:
        seconds: Time that compilation took; `None` before the first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self._compiler = partial(torch.compile, dynamic=True, backend=backend)
        self._uncompiled, self._whole = function, self._compiler(function)
        self._module = module
        self._blocks: dict[nn.Module, Callable[..., Any]] | None = None  # compiled; `None` before the first call
        self._ran: set[nn.Module] = set()
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
                output = self._run(arguments)
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

    def _run(self, arguments: dict[str, Any]) -> Any:
        """Run the function with its blocks compiled, or compiled as a whole if it does not run them all."""
        if self._blocks is None:
            blocks = [] if self._module is None else repeated_blocks(self._module)
            self._blocks = {block: self._compiler(block.forward) for block in blocks}
        if self._blocks:
            with self._compiled_blocks(self._blocks):
                output = self._uncompiled(**arguments)
            if self._ran.issuperset(self._blocks):
                return output
            self._blocks = {}
        return self._whole(**arguments)

    @contextmanager
    def _compiled_blocks(self, blocks: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
        """Run what was compiled of blocks in the place of their forwards inside the block."""

        def noted(block: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._ran.add(block)
            return compiled(*args, **kwargs)

        before = {block: vars(block).get("forward") for block in blocks}
        try:
            for block, compiled in blocks.items():
                block.forward = partial(noted, block, compiled)
            yield
        finally:
            for block, own in before.items():
                if own is None:
                    vars(block).pop("forward", None)
                else:
                    block.forward = own


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that lie in a list with others of their class, if most parts of the module are theirs."""
    parts = list(module.modules())
    found, inside = list[nn.Module](), set[nn.Module]()
    for part in parts:
        if part not in inside and isinstance(part, nn.ModuleList | nn.Sequential):
            kinds = Counter(map(type, part))
            blocks = [block for block in part if kinds[type(block)] > 1 and any(block.children())]
            found += blocks
            inside.update(chain.from_iterable(block.modules() for block in blocks))
    return found if 2 * len(inside) > len(parts) else []
