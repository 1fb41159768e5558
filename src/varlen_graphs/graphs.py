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
from varlen_graphs.layout import ItemTable, Layout
from varlen_graphs.outputs import Extent, Rebuild, flatten
from varlen_graphs.packing import Pack
from varlen_graphs.spec import BufferSpec

Forward = Callable[[Tensor, ItemTable, dict[str, Tensor]], Any]
"""The one forward: from rows, items and host buffers to the module's output."""


class Graphs:
    """Captures a forward once a budget, largest first, and replays it.

    Static outputs are prefixes of one arena: the last operations of each graph copy into it, so that the outputs of a
    budget need not be kept apart from the memory that other budgets' graphs use.

    Args:
        spec: The declaration.
        arena: Where the forward finds its inputs.
        budgets: Which graphs to capture.
        forward: What to capture.
        backend: How.
    """

    def __init__(
        self, spec: BufferSpec, arena: Arena, budgets: Sequence[Budget], forward: Forward, backend: Backend
    ) -> None:
        self._spec = spec
        self._arena = arena
        self._forward = forward
        self._graphs: dict[Budget, Graph] = {}
        self._held: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._extents: list[Extent] = []
        self.rebuild: Rebuild
        for budget in tqdm(sorted(budgets, reverse=True), desc="capturing", unit="graph", delay=2, leave=False):
            self._arena.load_sample(budget)
            if not self._outputs:
                self._prepare_outputs(budget, budgets)
            self._graphs[budget] = backend.capture(partial(self._run, budget), name=_name(budget))

    def _prepare_outputs(self, largest: Budget, budgets: Sequence[Budget]) -> None:
        """Run once to see what comes out, and once more to see what memory is read."""
        self._forward(*self._arena.view(largest))
        with ReadMemory() as memory:
            output = self._forward(*self._arena.view(largest))
        self._held = memory.tensors
        leaves, self._extents, self.rebuild = flatten(output, self._spec.outputs)
        if not leaves:
            raise SpecError(f"the module returned {type(output).__name__} without any tensor: expected at least one")
        for leaf, extent in zip(leaves, self._extents, strict=True):
            _check_extent(leaf, extent, largest)
            capacity = max(extent.capacity(budget) for budget in budgets)
            self._outputs.append(torch.zeros((capacity, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device))

    def _run(self, budget: Budget) -> None:
        """What is captured: the forward at a budget, and the copies of its outputs to where callers find them."""
        leaves, extents, _ = flatten(self._forward(*self._arena.view(budget)), self._spec.outputs)
        for leaf, extent, static in zip(leaves, extents, self._outputs, strict=True):
            _check_extent(leaf, extent, budget)
            static[: extent.capacity(budget)].copy_(leaf)

    def replay(self, rows: Tensor, layout: Layout, pack: Pack, budget: Budget) -> list[tuple[Tensor, Extent]]:
        """Replay one pack; its outputs stay valid until the next replay in the pool."""
        self._arena.load(rows, layout, pack, budget)
        self._graphs[budget].replay()
        return list(zip(self._outputs, self._extents, strict=True))

    def __len__(self) -> int:
        return len(self._graphs)

    def poison(self) -> None:
        """Overwrite the outputs with NaN."""
        for static in self._outputs:
            poison(static)


def _name(budget: Budget) -> str:
    return f"varlen_graphs {budget.rows} rows"


def _check_extent(leaf: Tensor, extent: Extent, budget: Budget) -> None:
    if leaf.dim() == 0 or leaf.shape[0] != extent.capacity(budget):
        raise SpecError(
            f"an output of shape {list(leaf.shape)} is declared as {extent}, which has {extent.capacity(budget)} "
            f"entries at {budget}; declare it as Rows(every=...) or Items(rows=...) to match"
        )
