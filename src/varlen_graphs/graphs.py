"""The graphs of an encoder for one set of static arguments: one a budget, and the outputs they share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from varlen_graphs.arena import Arena
from varlen_graphs.budgets import Budget
from varlen_graphs.capture.base import Backend, Graph
from varlen_graphs.capture.memory import ReadMemory, poison
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.attention.backends import measuring
from varlen_graphs.layout import Layout
from varlen_graphs.outputs import Declared, Extent, Parts, check_extents, flatten
from varlen_graphs.packing import Pack
from varlen_graphs.table import ItemTable

BoundForward = Callable[[Tensor, ItemTable, dict[str, Tensor]], Any]
"""The one forward with its static arguments bound: from rows, items and host buffers to the module's output."""


class Graphs:
    """Captures a forward once a budget, largest first, and replays it.

    Static outputs are prefixes of one arena: the last operations of each graph copy into it, so that the outputs of a
    budget need not be kept apart from the memory that other budgets' graphs use.

    Args:
        declared: What the forward's output is.
        arena: Where the forward finds its inputs.
        budgets: Which graphs to capture.
        forward: What to capture. Not kept.
        backend: How.

    Attributes:
        rebuild: Puts tensors in the places of the output, in a new object.
    """

    def __init__(
        self, declared: Declared, arena: Arena, budgets: Sequence[Budget], forward: BoundForward, backend: Backend
    ) -> None:
        self._arena = arena
        self._graphs: dict[Budget, Graph] = {}
        memory = ReadMemory(arena.rows.device, "the module")
        outputs = None
        for probe in arena.probes():  # rows and items in two proportions: a wrong declaration fits one of them at most
            check_extents(flatten(forward(*probe), declared), probe[1].budget)
        for budget in tqdm(sorted(budgets, reverse=True), desc="capturing", unit="graph", delay=2, leave=False):
            arena.load_sample(budget)
            warm_up = partial(_run_parts, forward, arena, declared, budget)
            with measuring():
                warm_up()  # fills whatever the module computes once and keeps, so that the watched run finds it
            with memory:
                parts = warm_up()
            if outputs is None:
                outputs = _Outputs(parts, budgets)
            outputs.check_constants(parts)
            del parts
            memory.hold_state()
            run = partial(_run, forward, arena, declared, budget, outputs)
            self._graphs[budget] = backend.capture(run, name=f"varlen_graphs {budget.rows} rows")
        assert outputs is not None  # noqa: S101 - there is at least one budget
        self._held = [*memory.held.values()]
        self._outputs = outputs
        self.rebuild = outputs.rebuild

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, rows: Tensor, layout: Layout, pack: Pack, budget: Budget) -> list[tuple[Tensor, Extent]]:
        """Replay one pack; its outputs stay valid until the next replay in the pool."""
        self._arena.load(rows, layout, pack, budget)
        self._graphs[budget].replay()
        return list(zip(self._outputs.statics, self._outputs.extents, strict=True))

    def poison(self) -> None:
        """Overwrite the outputs with NaN."""
        for static in self._outputs.statics:
            poison(static)


class _Outputs:
    """The static outputs of all budgets, allocated by what the largest budget gave."""

    def __init__(self, parts: Parts, budgets: Sequence[Budget]) -> None:
        if not parts.tensors:
            raise SpecError("the module returned no tensor: expected at least one")
        try:
            parts.rebuild(parts.tensors)
        except TypeError as error:
            raise SpecError(f"the module's output cannot be made anew from its parts: {error}") from error
        self.rebuild = parts.rebuild
        self.extents = parts.extents
        self.constants = parts.constants
        self.statics = [
            torch.zeros(
                (max(extent.capacity(budget) for budget in budgets), *tensor.shape[1:]),
                dtype=tensor.dtype,
                device=tensor.device,
            )
            for tensor, extent in zip(parts.tensors, parts.extents, strict=True)
        ]

    def check_constants(self, parts: Parts) -> None:
        """Whether the Python values in the output are those of every budget: a replay would give them for any call."""
        if repr(parts.constants) != repr(self.constants):
            raise SpecError(
                f"the output holds Python values that depend on the budget, {self.constants} and {parts.constants}: a "
                "graph would freeze them; leave them out, or compute them from the layout outside of the module"
            )


def _run_parts(forward: BoundForward, arena: Arena, declared: Declared, budget: Budget) -> Parts:
    """The forward at a budget, its output taken apart and checked."""
    parts = flatten(forward(*arena.view(budget)), declared)
    check_extents(parts, budget)
    return parts


def _run(forward: BoundForward, arena: Arena, declared: Declared, budget: Budget, outputs: _Outputs) -> None:
    """What is captured: the forward at a budget, and the copies of its outputs to where callers find them."""
    parts = _run_parts(forward, arena, declared, budget)
    for tensor, static in zip(parts.tensors, outputs.statics, strict=True):
        static[: tensor.shape[0]].copy_(tensor)
