"""The graphs of an encoder for one set of static arguments: one a budget, and some for calls of exactly their size."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.backend import Graph
from varlen_graphs.capture.consensus import Consensus
from varlen_graphs.errors import VerificationError
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.bound_forward import BoundForward
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.gpu_checks import GpuChecks
from varlen_graphs.graphs.output_form import OutputForm
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.routing.costs import Costs
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.shadows.snapshot import Snapshot

CLOSE = 1.25
"""Ratio of the rows of budgets between which attention is timed at no other, whatever it chooses at these."""


class CaptureInputs(NamedTuple):
    """Inputs that a set of graphs is captured for, with any adapters."""

    static_args: dict[str, Any]
    row_shape: tuple[int, ...]
    device: torch.device


class HeldMemory(NamedTuple):
    """Memory that the graphs of one capture read, beside the arena and the checks.

    Attributes:
        aliases: An alias of each storage by its address, which keeps it.
        read: The tensors themselves by these addresses, to detect later changes to them.
        state: uint8: what runs before the capture left behind, and the captured run may read.
        own: Addresses of memory of shadows of the module, which nobody else holds.
    """

    aliases: dict[int, Tensor]
    read: dict[int, Tensor]
    state: list[Tensor]
    own: set[int]


class GraphSet:
    """Graphs for one set of static arguments and adapters.

    Outputs stay where each graph computes them, in memory that the other graphs of the pool use too: copy them before
    the next replay.

    Args:
        inputs: The inputs that the graphs are captured for.
        arena: Static inputs of the forward.
        checks: Checks the item table, as the first operation of each graph.
        consensus: Consensus with other ranks that capture the module: what fails on one is left out on all.
        timed: True if costs are measured with these graphs.

    Attributes:
        inputs, arena, checks, consensus, timed: As given.
        exact: The sizes of graphs for calls of exactly that size, with the budgets that such calls use without them.
        failed: Reasons why budgets could not be captured.
        rejected: Reasons why graphs failed verification at their capture; these budgets are not captured again.
        against: The outputs that replays were compared with in the check, in words for the report.
        unverified: What the check left out because it takes too long, in words for the report.
        compared: Budgets of which the replay of a call was compared with the module itself.
        split_is_right: True if that of a call in several replays was, and was right; False once one was wrong, or a
            budget was, which others replace.
        form: The form of the outputs; `None` before the first graph.
        extents: Extent of each tensor of the output.
        rebuild: Builds a new output object from tensors.
        constants: The Python values in the output; `None` before the first capture.
        per_square: Milliseconds of our own attention for each squared row of a segment.
        most_rows: Rows of the largest budget that was ever captured, by which the pool is sized.
        mutated_state: Addresses of what runs of the module write to.
        alike: True if the next budget is captured without a run: the last watched run of a size that had not run before
            kept no tensor and copied none from the host.
        attention: The backends that attention chose in the runs of budgets, in order, on a GPU.
        meets_compiler: True if runs meet code of torch's compiler.
        captured: The forward that was captured last, and its shadow of the module.
        eager: The forward of the last eager runs beside captures, and its shadow, unless that takes much memory.
        snapshot: What the module kept before the first capture.
        moving: Paths of attributes and containers that runs change, and that changes no output.
        kept: Paths of what every run of the module changes, and that changes no output: replays leave it as it is.
        kept_outside: Descriptions of tensors that a run made, and that something outside of the module keeps.
    """

    per_square: float
    extents: Sequence[Extent]
    rebuild: Callable[[Sequence[Tensor]], Any]

    def __init__(
        self, inputs: CaptureInputs, arena: Arena, checks: GpuChecks, consensus: Consensus, timed: bool
    ) -> None:
        self.inputs = inputs
        self.arena = arena
        self.checks = checks
        self.consensus = consensus
        self.timed = timed
        self.exact: dict[Budget, Budget] = {}
        self.failed: dict[Budget, str] = {}
        self.rejected: dict[Budget, str] = {}
        self.against: set[str] = set()
        self.unverified: set[str] = set()
        self.compared: set[Budget] = set()
        self.split_is_right: bool | None = None
        self.form: OutputForm | None = None
        self.constants: Sequence[Any] | None = None
        self.most_rows = 0
        self.mutated_state: set[int] = set()
        self.alike = False
        self.attention: dict[Budget, list[str]] = {}
        self.meets_compiler = False
        self.captured: tuple[BoundForward, Shadow] | None = None
        self.eager: tuple[Forward, Shadow] | None = None
        self.snapshot = Snapshot()
        self.moving: set[str] = set()
        self._changed: set[str] = set()  # of these, what the module itself has changed
        self.kept: list[str] = []
        self.kept_outside: list[str] = []
        self._graphs: dict[Budget, Graph] = {}
        self._memory: dict[Budget, HeldMemory] = {}
        self._usable: dict[bool, tuple[Costs, Costs, int]] = {}
        self._changes = 0

    def memory(self) -> HeldMemory:
        """Return what the graphs of budgets read, all of it; no other graph may read what one of an exact size kept."""
        held = HeldMemory({}, {}, [], set())
        for one in {id(one): one for budget, one in self._memory.items() if budget not in self.exact}.values():
            held.aliases.update(one.aliases)
            held.read.update(one.read)
            held.state.extend(one.state)
            held.own.update(one.own)
        return held

    @property
    def read(self) -> dict[int, Tensor]:
        """Tensors that the graphs read by their addresses, without the arena and the checks."""
        static = {tensor.untyped_storage().data_ptr() for tensor in (*self.arena.memory, *self.checks.memory)}
        every = {id(one): one for one in self._memory.values()}.values()
        return {address: tensor for one in every for address, tensor in one.read.items() if address not in static}

    @property
    def own(self) -> set[int]:
        """Addresses of memory that graphs read, and that their captures made for them alone."""
        return set().union(*(one.own for one in self._memory.values()))

    def add(self, budget: Budget, graph: Graph, fallback: Budget | None = None) -> None:
        """Add a graph, which must be held with `hold` before it replays; with a fallback, one of an exact size."""
        if fallback is not None:
            self.exact[budget] = fallback
        self._graphs[budget] = graph
        self.most_rows = max(self.most_rows, budget.rows)
        self._changes += 1

    def hold(self, budgets: Sequence[Budget], memory: HeldMemory) -> None:
        """Hold the memory that the graphs of these budgets read for as long as one of them is there."""
        self._memory.update(dict.fromkeys((budget for budget in budgets if budget in self), memory))

    def compare_again(self, changed: Collection[str]) -> str | None:
        """Compare the next call of each graph once more where the module itself has changed what it keeps.

        Args:
            changed: Places of what it has changed.

        Returns:
            A place that no run for captures has changed, if there is one: what graphs hold is as if it were as before.
        """
        if not self._changed.issuperset(known := self.moving.intersection(changed)):
            self._changed |= known
            self.compared.clear()
            self.split_is_right = self.split_is_right and None  # once wrong, always wrong
        return min(set(changed) - known, default=None)

    def attention_around(self, budget: Budget) -> list[str] | None:
        """Return what attention chose at the next smaller budget, if the next larger one chose the same, or is close.

        Where choices change, the backends take about the same time.
        """
        below = max((one for one in self.attention if one <= budget), default=None)
        above = min((one for one in self.attention if one >= budget), default=None)
        if below is None or above is None:
            return None
        agree = self.attention[below] == self.attention[above] or above.rows <= CLOSE * below.rows
        return self.attention[below] if agree else None

    def usable(self, costs: Costs, captured: bool) -> Costs:
        """Return these costs, without budgets that were rejected; if `captured`, of those alone that have a graph."""
        found, changes = self._usable.get(captured), self._changes  # which another thread may change
        if found is None or found[0] is not costs or found[2] != changes:
            without = [b for b in costs.replays if b not in self] if captured else self.rejected
            self._usable[captured] = found = costs, costs.without(without), changes
        return found[1]

    def drop(self, budget: Budget) -> None:
        """Drop the graph of a budget, if there is one; no replay of it may be running."""
        self._graphs.pop(budget, None)
        self._memory.pop(budget, None)
        self.exact.pop(budget, None)
        self.compared.discard(budget)
        self.arena.forget(budget)
        self._changes += 1

    @contextmanager
    def dropped_on_error(self, budgets: Sequence[Budget]) -> Iterator[None]:
        """Drop the graphs of budgets if an error leaves them unverified. A check that fails has rejected them."""
        try:
            yield
        except VerificationError:
            raise
        except BaseException:
            for budget in budgets:
                self.drop(budget)
            raise

    def lacks(self, budget: Budget) -> bool:
        """Return True if a budget has no graph, and none was rejected."""
        return budget not in self._graphs and budget not in self.rejected

    def reject(self, budget: Budget, reason: str) -> None:
        """Drop the graph of a budget, if there is one, and never capture it again."""
        self.rejected[budget] = reason
        self.drop(budget)

    def clear(self) -> None:
        """Drop all graphs, and the copies of the module."""
        for graphs in (self._graphs, self._memory, self.exact):
            graphs.clear()
        self.captured = self.eager = None
        self._changes += 1

    def bytes(self) -> dict[Budget, int]:
        """Return the bytes that the graph of each budget, and exact size, takes beside the pool and the arena."""
        return {budget: graph.bytes for budget, graph in self._graphs.items()}

    def __contains__(self, budget: Budget) -> bool:
        return budget in self._graphs

    def __getitem__(self, budget: Budget) -> Graph:
        return self._graphs[budget]

    @property
    def budgets(self) -> list[Budget]:
        """The budgets that have a graph, without exact sizes."""
        return [budget for budget in [*self._graphs] if budget not in self.exact]

    def __len__(self) -> int:
        return len(self._graphs) - len(self.exact)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())

    def replay(self, budget: Budget) -> list[Tensor]:
        """Replay the arena's content; outputs, padding included, stay valid until the next replay in the pool."""
        graph = self._graphs[budget]
        graph.replay()
        return graph.outputs
