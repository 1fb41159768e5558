"""The graphs of an encoder for one set of static arguments: one a budget."""

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from textwrap import shorten
from typing import Any

from torch import Tensor

from varlen_graphs.attention.timing import AttentionCost, measuring
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.backend import CAPTURE_LOCK, Backend, Graph
from varlen_graphs.capture.consensus import Consensus, Failure
from varlen_graphs.capture.memory import empty_cache, forget_frames
from varlen_graphs.errors import CaptureError
from varlen_graphs.graphs.allowance import Allowance
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.bound_forward import BoundForward, outputs_of
from varlen_graphs.graphs.gpu_checks import GpuChecks
from varlen_graphs.graphs.output_form import OutputForm, check_constants
from varlen_graphs.graphs.progress import Progress
from varlen_graphs.kernels.launch import compiling_in_threads
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.routing.costs import Costs
from varlen_graphs.watch.read_memory import ReadMemory
from varlen_graphs.watch.shadow import address_of, describe


class GraphSet:
    """Captures a forward once a budget, largest first. More budgets may be captured later.

    Outputs stay where each graph computes them, in memory that the other graphs of the pool use too: copy them before
    the next replay.

    Args:
        arena: Static inputs of the forward.
        checks: Checks the item table, as the first operation of each graph.
        consensus: Consensus with other ranks that capture the module: what fails on one is left out on all.
        timed: True if costs are measured with these graphs.
        fallback_budget: Budget that calls would use without the graph of exactly their size.
        defaults: Budgets that nobody asked for.
        allowance: Decides which of those are left out; `None` leaves none out.

    Attributes:
        arena: As given.
        checks: As given.
        consensus: As given.
        failed: Reasons why budgets could not be captured.
        refused: Reasons why graphs failed the proof at their capture; these budgets are not captured again.
        against: The outputs that replays were compared with in the proof, in words for the report.
        unproven: What the proof left out because it takes too long, in words for the report.
        extents: Extent of each tensor of the output.
        per_square: Milliseconds of our own attention for each squared row of a segment.
        rebuild: Builds a new output object from tensors.
        most_rows: Rows of the largest budget that was ever captured, by which the pool is sized.
        timed: True if costs were measured with these graphs.
        fallback_budget: Budget that calls would use without the graph of exactly their size; `None` if graphs are of
            budgets.
        left_out: Default budgets that take too much memory or time, with the reasons.
        compared: Budgets of which the replay of a call was compared with the module itself.
        kept: Paths of what every run of the module changes, and that changes no output: replays leave it as it is.
        kept_outside: Descriptions of tensors that a run made, and that something outside of the module keeps.
        own: Addresses of the memory of shadows of the module that graphs may read, which nobody else holds.
    """

    per_square: float
    extents: Sequence[Extent]
    rebuild: Callable[[Sequence[Tensor]], Any]

    def __init__(
        self, arena: Arena, checks: GpuChecks, consensus: Consensus, *, timed: bool,
        fallback_budget: Budget | None = None, defaults: Collection[Budget] = (), allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        self.arena = arena
        self.checks = checks
        self.consensus = consensus
        self.failed: dict[Budget, str] = {}
        self.refused: dict[Budget, str] = {}
        self.against: set[str] = set()
        self.unproven: set[str] = set()
        self.most_rows = 0
        self.timed = timed
        self.fallback_budget = fallback_budget
        self.compared: set[Budget] = set()
        self.own: set[int] = set()
        self.kept: list[str] = []
        self.kept_outside: list[str] = []
        self.left_out: dict[Budget, str] = {}
        self._defaults = frozenset(defaults)
        self._allowance = allowance
        self._state: list[Tensor] = []  # memory that runs before the captures left behind, and that graphs may read
        self._usable: dict[bool, tuple[Costs, Costs, int]] = {}
        self._changes = 0
        self._graphs: dict[Budget, Graph] = {}
        self.constants: Sequence[Any] | None = None
        self._form: OutputForm | None = None
        self._held: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}

    @property
    def read(self) -> list[Tensor]:
        """Tensors that the graphs read, without the arena and the checks."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*self.arena.memory, *self.checks.memory)}
        return [tensor for address, tensor in self._read.items() if address not in own]

    def capture(
        self, budgets: Sequence[Budget], forward: BoundForward, backend: Backend, spare: Sequence[Budget] = ()
    ) -> list[Budget]:
        """Capture budgets that have no graph yet, largest first.

        A budget whose capture fails is left out. If it is the largest, and there is no graph yet, the smallest is tried
        next: if that fails as well, the forward cannot be captured. Memory may be short for large budgets only, so then
        all are tried, spare ones too, until there is a graph. After any other error this call leaves nothing behind.

        Args:
            budgets: The budgets.
            forward: The forward; not kept.
            backend: Captures it.
            spare: More budgets, to try while there is no graph.

        Returns:
            The budgets that were tried.

        Raises:
            SpecError: The output is not as declared.
            CaptureError: There is no graph, and no budget could be captured.
            Exception: The error of the forward at the largest budget and at the smallest.
        """
        consensus, is_new = self.consensus, self.constants is None
        if is_new:
            with consensus.collective_try() as outcome, consensus.dry_run(), compiling_in_threads():
                self.constants = forward.probe(self.arena)
            outcome.check()
        budgets, spare = self._within_allowance(budgets, spare, forward)
        if is_new:
            self._compile(budgets, forward)
        memory = ReadMemory(self.arena.rows.device, "the module", takes_constants=not forward.is_compiled)
        memory.held, memory.read, memory.state = dict(self._held), dict(self._read), [*self._state]
        before = set(self._graphs)
        try:
            tried = self._capture_all(budgets, forward, backend, memory, spare)
        except BaseException:
            for budget in self._graphs.keys() - before:
                self.drop(budget)  # whoever keeps the traceback does not keep the memory
            raise
        self._held, self._read, self._state = memory.held, memory.read, memory.state
        return tried

    def _within_allowance(
        self, budgets: Sequence[Budget], spare: Sequence[Budget], forward: BoundForward
    ) -> tuple[Sequence[Budget], Sequence[Budget]]:
        """Return these budgets without the default ones that take too much memory or time."""
        allowance, defaults = self._allowance, [one for one in {*budgets, *spare} if one in self._defaults]
        if allowance is None or not defaults:
            return budgets, spare

        def run(budget: Budget) -> None:
            self.arena.load_sample(budget)
            self.arena.source.copy(budget.rows)  # of none
            with self.consensus.dry_run():
                forward(*self.checks.view(self.arena, budget), compiled=False)

        left_out: dict[Budget, str] = {}
        if not allowance.is_measured:
            with CAPTURE_LOCK, self.consensus.collective_try() as outcome:
                left_out = allowance.of_runs(defaults, run)
            outcome.take()  # errors come again
        budgets, spare = self._without(self.consensus.same(left_out), budgets, spare)
        left_out = allowance.of_tapes([one for one in budgets if one in defaults])
        return self._without(self.consensus.same(left_out), budgets, spare)

    def _without(
        self, left_out: dict[Budget, str], budgets: Sequence[Budget], spare: Sequence[Budget]
    ) -> tuple[Sequence[Budget], Sequence[Budget]]:
        """Leave budgets out. The largest one left takes the place of a larger one, which sizes the memory of all."""
        self.left_out |= left_out
        wanted, others = ([one for one in some if one not in left_out] for some in (budgets, spare))
        if others and (not wanted or max(others) > max(wanted)) and len(wanted) < len(budgets):
            largest = max(others)
            wanted, others = [*wanted, largest], [one for one in others if one != largest]
        return wanted, others

    def _compile(self, budgets: Sequence[Budget], forward: BoundForward) -> None:
        """Run the smallest and the largest budget, whose kernels compile in threads. Errors come again later.

        The smallest comes first: kernels that it loads are there for the largest, where references take long.
        """
        if not self.arena.rows.is_cuda or not budgets:
            return
        with CAPTURE_LOCK, self.consensus.collective_try() as outcome, compiling_in_threads():
            for budget in sorted({min(budgets), max(budgets)}):
                self.arena.load_sample(budget)
                self.arena.source.copy(budget.rows)  # of none
                with self.consensus.dry_run():
                    forward(*self.checks.view(self.arena, budget))
        outcome.take()

    def _capture_all(
        self,
        budgets: Sequence[Budget],
        forward: BoundForward,
        backend: Backend,
        memory: ReadMemory,
        spare: Sequence[Budget],
    ) -> list[Budget]:
        waiting, others, tried = deque(sorted(budgets, reverse=True)), deque(sorted(spare, reverse=True)), []
        first: Exception | None = None
        with Progress(len(waiting)) as progress:
            while waiting or (others and not self._graphs):
                if first is None:
                    tried.append(budget := (waiting or others).popleft())
                else:  # the smallest comes next
                    smallest = min(filter(None, (waiting, others)), key=lambda queue: queue[-1])
                    tried.append(budget := smallest.pop())
                failure = self._capture(budget, forward, backend, memory)
                progress.update()
                if failure is None:
                    self.failed.pop(budget, None)
                    if first is not None:
                        forget_frames(first)
                        first = None
                    continue
                error, kind = failure
                del failure
                if kind == "declaration":
                    raise error
                self.failed[budget] = reason_of(error)
                if kind == "memory":
                    forget_frames(error)
                    empty_cache(self.arena.rows.device)
                elif not self._graphs:
                    if first is not None:
                        raise first from None
                    first = error
                del error
        if not self._graphs:
            raise first or CaptureError(
                f"no budget could be captured, because memory is short: {self.failed[min(tried)]}\n"
                "Give the encoder smaller budgets, or free memory first."
            )
        return tried

    def _capture(self, budget: Budget, forward: BoundForward, backend: Backend, memory: ReadMemory) -> Failure | None:
        """Capture a budget after two runs of it or more; return the failure, if there is one."""
        arena, checks, consensus, device = self.arena, self.checks, self.consensus, self.arena.rows.device
        attention = AttentionCost()

        def run() -> list[Tensor]:
            arena.source.copy(budget.rows)
            return outputs_of(forward(*checks.view(arena, budget)))

        def run_dry() -> None:
            with consensus.dry_run():
                forward(*checks.view(arena, budget))

        with CAPTURE_LOCK:
            with consensus.collective_try() as outcome:  # fills what the module computes once and keeps
                arena.load_sample(budget)
                arena.source.copy(budget.rows)  # of none, so that its kernel is loaded
                with measuring() as measured, consensus.dry_run():
                    forward(*checks.view(arena, budget))
                attention.per_square = measured.per_square
                if not consensus.alone:  # what no graph can hold must be found before other ranks wait for this one
                    ReadMemory(device, "the module", memory.takes_constants).watch(run_dry)
            if outcome.failure is None:
                with consensus.collective_try() as outcome:
                    parts = memory.watch(lambda: forward(*checks.view(arena, budget)))
                    form = self._form or OutputForm(parts)
                    form.check(parts)
                    check_constants(parts.constants, self.constants or [])
                    del parts
                    self.kept_outside = self.kept_outside or _kept_outside(memory, forward)
                    memory.hold_state()
                    graph = backend.capture(run, f"varlen_graphs {budget.rows} rows", memory.constants)
                    form.check_captured(graph.outputs)
                    if self._form is None:
                        self._form = form
                        self.per_square, self.extents, self.rebuild = attention.per_square, form.extents, form.rebuild
                    self._graphs[budget] = graph
        if outcome.failure is not None:
            self._graphs.pop(budget, None)  # another rank has failed
            return outcome.take()
        self._changes += 1
        self.most_rows = max(self.most_rows, budget.rows)
        return None

    def usable(self, costs: Costs, captured: bool) -> Costs:
        """Return these costs, without budgets that were refused; if `captured`, of those alone that have a graph."""
        found, changes = self._usable.get(captured), self._changes  # which another thread may change
        if found is None or found[0] is not costs or found[2] != changes:
            without = [b for b in costs.replays if b not in self] if captured else self.refused
            self._usable[captured] = found = costs, costs.without(without), changes
        return found[1]

    def drop(self, budget: Budget) -> None:
        """Drop the graph of a budget, if there is one; no replay of it may be running."""
        self._graphs.pop(budget, None)
        self.compared.discard(budget)
        self.arena.forget(budget)
        self._changes += 1

    def lacks(self, budget: Budget) -> bool:
        """Return True if a budget has no graph, and none was refused."""
        return budget not in self._graphs and budget not in self.refused

    def refuse(self, budget: Budget, reason: str) -> None:
        """Drop the graph of a budget, if there is one, and never capture it again."""
        self.refused[budget] = reason
        self.drop(budget)

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._changes += 1

    def bytes(self) -> dict[Budget, int]:
        """Return the bytes that the graph of each budget takes beside the pool and the arena."""
        return {budget: graph.bytes for budget, graph in self._graphs.items()}

    def __contains__(self, budget: Budget) -> bool:
        return budget in self._graphs

    def __getitem__(self, budget: Budget) -> Graph:
        return self._graphs[budget]

    @property
    def budgets(self) -> list[Budget]:
        """The budgets that have a graph."""
        return [*self._graphs]

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())

    def replay(self, budget: Budget) -> list[Tensor]:
        """Replay the arena's content; outputs, padding included, stay valid until the next replay in the pool."""
        graph = self._graphs[budget]
        graph.replay()
        return graph.outputs


def _kept_outside(memory: ReadMemory, forward: BoundForward) -> list[str]:
    """Describe what the watched run made and something keeps: neither the module nor a function beside it."""
    held = forward.held() if memory.alive() else set()

    def kept() -> list[str]:
        found = {address_of(tensor): describe(tensor) for tensor in memory.alive()}
        return [what for address, what in found.items() if address not in held]

    if kept():
        gc.collect()  # nobody keeps what only a cycle refers to
    return kept()


def reason_of(error: BaseException) -> str:
    """Return the error and its line, in one line."""
    what, *rest = str(error).splitlines() or [""]
    where = next((line for line in rest if line.startswith("  at ")), "")
    kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
    return shorten(f"{kind}{what}{where}", 400)
