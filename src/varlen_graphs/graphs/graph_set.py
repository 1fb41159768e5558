"""The graphs of an encoder for one set of static arguments: one a budget."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from varlen_graphs.attention.timing import Attention, measuring
from varlen_graphs.capture.agreement import Agreement, Failure
from varlen_graphs.capture.backend import CAPTURE_LOCK, Backend, Graph
from varlen_graphs.capture.memory import forget_frames
from varlen_graphs.errors import CaptureError, SpecError
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.gpu_checks import Deferred
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.routing.costs import Costs
from varlen_graphs.spec.entries import Extent
from varlen_graphs.spec.outputs import Declared, Parts, check_extents, clear_gaps, flatten
from varlen_graphs.watch.read_memory import ReadMemory

BoundForward = Callable[..., Any]
"""The one forward with its static arguments bound: from rows, items and host buffers to the module's output.

By the compiler's code, if there is one, unless it is called with `compiled=False`.
"""


class Graphs:
    """Captures a forward once a budget, largest first, and replays it. More budgets may be captured later.

    Outputs stay where each graph computes them, in memory that the other graphs of the pool use too: they are to be
    copied out before the next replay.

    Args:
        declared: What the forward's output is.
        arena: Where the forward finds its inputs.
        deferred: Checks the item table, first of all.
        agreement: With the other ranks that capture the module, if there are any: what fails on one of them is left out
            on all.

    Attributes:
        arena: As given.
        failed: Why budgets could not be captured.
        extents: What each tensor of the output is.
        per_square: Milliseconds that attention takes for each squared row of a segment, as far as it is our own.
        state: What runs before the captures left behind, which graphs may read too.
        rebuild: Puts tensors in the places of the output, in a new object.
        times: How often each budget was captured.
        complete_for: The costs of budgets that all have a graph here, if these are known.
    """

    per_square: float
    extents: Sequence[Extent]
    rebuild: Callable[[Sequence[Tensor]], Any]

    def __init__(self, declared: Declared, arena: Arena, deferred: Deferred, agreement: Agreement) -> None:
        self.arena = arena
        self.failed: dict[Budget, str] = {}
        self.times: Counter[Budget] = Counter()
        self.complete_for: Costs | None = None
        self._usable: tuple[Costs, Costs, int] | None = None
        self._changes = 0
        self._declared = declared
        self._deferred = deferred
        self._agreement = agreement
        self._graphs: dict[Budget, Graph] = {}
        self._constants: Sequence[Any] | None = None
        self._form: _Form | None = None
        self._held: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        self.state: list[Tensor] = []

    @property
    def read(self) -> list[Tensor]:
        """What the graphs read that is neither the arena nor what checks it."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*self.arena.memory, *self._deferred.memory)}
        return [tensor for address, tensor in self._read.items() if address not in own]

    def capture(self, budgets: Sequence[Budget], forward: BoundForward, backend: Backend) -> None:
        """Capture budgets, largest first.

        A budget whose capture fails is left out. If it is the largest, and there is no graph yet, the smallest is tried
        next: where that fails as well, the forward cannot be captured. Memory may be short for large budgets only, so
        then all are tried. After any other error nothing is left of this call.

        Args:
            budgets: Which, of those that have no graph.
            forward: What to capture. Not kept.
            backend: How.

        Raises:
            SpecError: The output is not what was declared.
            CaptureError: There is no graph, and no budget could be captured.
            Exception: What the forward raised at the largest budget and at the smallest.
        """
        agreement = self._agreement
        if self._constants is None:
            probe = partial(_probe_all, forward, self.arena, self._declared)
            self._constants = agreement.must(lambda: agreement.rehearse(probe))
        constants = self._constants
        memory = ReadMemory(self.arena.rows.device, "the module")
        memory.held, memory.read, memory.state = dict(self._held), dict(self._read), [*self.state]
        before = set(self._graphs)
        try:
            self._capture_all(budgets, partial(self._capture, forward, backend, memory, constants))
        except BaseException:
            for budget in self._graphs.keys() - before:
                self.drop(budget)  # whoever keeps the traceback does not keep the memory
            raise
        self._held, self._read, self.state = memory.held, memory.read, memory.state

    def _capture_all(self, budgets: Sequence[Budget], capture: Callable[[Budget], Failure | None]) -> None:
        """Capture what can be captured."""
        waiting = deque(sorted(budgets, reverse=True))
        first: Exception | None = None
        for _ in tqdm(range(len(waiting)), desc="capturing", unit="graph", delay=2, leave=False):
            budget = waiting.popleft()
            failure = capture(budget)
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
                if self.arena.rows.is_cuda:
                    torch.cuda.empty_cache()
            elif not self._graphs:
                if first is not None:
                    raise first from None
                first = error
                waiting.rotate(1)  # the smallest comes next
            del error
        if not self._graphs:
            raise first or CaptureError(
                f"no budget could be captured, because memory is short: {self.failed[min(budgets)]}\n"
                "Give the encoder smaller budgets, or free memory first."
            )

    def _capture(
        self, forward: BoundForward, backend: Backend, memory: ReadMemory, constants: Sequence[Any], budget: Budget
    ) -> Failure | None:
        """Capture a budget, after two runs of it or more: what went wrong, if it did."""
        arena, deferred, declared, agreement = self.arena, self._deferred, self._declared, self._agreement
        attention = Attention()

        def warm_up() -> Parts:
            return _run_parts(forward, arena, deferred, declared, budget)

        def first_run() -> None:
            """Fill whatever the module computes once and keeps, so that the watched run finds it."""
            arena.load_sample(budget)
            with measuring() as measured:
                agreement.rehearse(warm_up)
            attention.per_square = measured.per_square
            if not agreement.alone:  # what no graph can hold is to be found before other ranks wait for this one
                with ReadMemory(arena.rows.device, "the module"):
                    agreement.rehearse(warm_up)

        def record() -> None:
            with memory:
                parts = warm_up()
            form = self._form or _Form(parts)
            form.check(parts)
            _check_constants(parts.constants, constants)
            del parts
            memory.hold_state()
            run = partial(_run, forward, arena, deferred, declared, budget)
            graph = backend.capture(run, name=f"varlen_graphs {budget.rows} rows")
            form.check_captured(graph.outputs)
            if self._form is None:
                self._form = form
                self.per_square, self.extents, self.rebuild = attention.per_square, form.extents, form.rebuild
            self._graphs[budget] = graph

        with CAPTURE_LOCK:
            failure = agreement.attempt(first_run) or agreement.attempt(record)
        if failure is not None:
            self._graphs.pop(budget, None)  # another rank has failed
            return failure
        self._changes += 1
        self.times[budget] += 1
        return None

    def usable(self, costs: Costs) -> Costs:
        """Of these costs those of budgets that have a graph."""
        found, changes = self._usable, self._changes  # which another thread may change
        if found is None or found[0] is not costs or found[2] != changes:
            usable = costs.without([budget for budget in costs.replays if budget not in self])
            self._usable = found = costs, usable, changes
        return found[1]

    def drop(self, budget: Budget) -> None:
        """Forget the graph of a budget, if there is one; no replay of it may be running."""
        self._graphs.pop(budget, None)
        self._changes += 1

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self._changes += 1

    def bytes(self) -> dict[Budget, int]:
        """What the graph of each budget takes beside the pool and the arena."""
        return {budget: graph.bytes for budget, graph in self._graphs.items()}

    def __contains__(self, budget: Budget) -> bool:
        return budget in self._graphs

    @property
    def budgets(self) -> list[Budget]:
        """The budgets that have a graph."""
        return [*self._graphs]

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())

    def replay(self, budget: Budget) -> list[Tensor]:
        """Replay what the arena holds; the outputs, padding included, stay valid until the next replay in the pool."""
        graph = self._graphs[budget]
        graph.replay()
        return graph.outputs


def reason_of(error: Exception) -> str:
    """What went wrong and where, in one line."""
    what, *rest = str(error).splitlines() or [""]
    where = next((line for line in rest if line.startswith("  at ")), "")
    kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
    return shorten(f"{kind}{what}{where}", 400)


def _probe_all(forward: BoundForward, arena: Arena, declared: Declared) -> Sequence[Any]:
    """The Python values of an output without padding, by runs that show what its tensors are, too.

    Of rows and items in two proportions: a wrong declaration fits one of them at most.
    """
    several = [_probe(forward, probe, declared) for probe in arena.probes()]
    first = several[0]
    for parts in several:
        _check_entries(_entries(parts), _entries(first))
        _check_constants(parts.constants, first.constants)
    return first.constants


def _probe(forward: BoundForward, probe: tuple[Tensor, ItemTable, dict[str, Tensor]], declared: Declared) -> Parts:
    """What a forward makes of a few rows without padding. Its errors, which may be of the declared shape, say so."""
    try:
        parts = flatten(forward(*probe, compiled=False), declared)
    except Exception as error:
        error.add_note(
            f"varlen_graphs ran the module with rows {list(probe[0].shape)}, items {probe[1].budget.items}, before the "
            "capture: if the error is about their shape, see what PackedRows(shape=...) declares, or the first call "
            "brought"
        )
        raise
    check_extents(parts, probe[1].budget)
    return parts


class _Form:
    """What the outputs of all budgets have in common, by what the largest budget gave."""

    def __init__(self, parts: Parts) -> None:
        if not parts.tensors:
            raise SpecError("the module returned no tensor: expected at least one")
        try:
            parts.rebuild(parts.tensors)
        except TypeError as error:
            raise SpecError(f"the module's output cannot be made anew from its parts: {error}") from error
        self.rebuild = parts.rebuild
        self.extents = parts.extents
        self._entries = _entries(parts)

    def check(self, parts: Parts) -> None:
        """Whether the output at a budget is that of every budget, but for the number of entries."""
        _check_entries(_entries(parts), self._entries)

    def check_captured(self, outputs: Sequence[Tensor]) -> None:
        """Whether a capture gave what the run before it gave, which compiled code may not."""
        came = [(extent.rest(tensor), tensor.dtype) for tensor, extent in zip(outputs, self.extents, strict=False)]
        if len(outputs) != len(self.extents) or came != self._entries:
            raise CaptureError(
                f"the capture gave {len(outputs)} tensors with entries {came}, the run before it {len(self.extents)} "
                f"with {self._entries}: expected the same of every run; with compile=True leave that out"
            )


def _check_constants(came: Sequence[Any], expected: Sequence[Any]) -> None:
    """Whether the Python values of an output are those of any call, as a replay gives them."""
    if repr(came) != repr(expected):
        raise SpecError(
            f"the output holds Python values that depend on the items, {expected} and {came}: a graph would freeze "
            "them; leave them out, or compute them from the layout outside of the module"
        )


EntryKinds = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of one entry of each tensor."""


def _check_entries(came: EntryKinds, expected: EntryKinds) -> None:
    if came != expected:
        raise SpecError(
            f"the entries of the outputs depend on the budget: {expected} and {came}; expected one shape and dtype for "
            "all budgets, so return what does not grow with the budget, and declare what has an entry a row as Rows()"
        )


def _entries(parts: Parts) -> EntryKinds:
    return [(extent.rest(tensor), tensor.dtype) for tensor, extent in zip(parts.tensors, parts.extents, strict=True)]


def _run_parts(forward: BoundForward, arena: Arena, deferred: Deferred, declared: Declared, budget: Budget) -> Parts:
    """The forward at a budget, its output taken apart and checked."""
    deferred.check(arena.header, arena.table[: budget.items], budget)
    rows, table, host = arena.view(budget)
    parts = flatten(forward(rows, table, host), declared)
    check_extents(parts, budget)
    clear_gaps(parts, table)
    return parts


def _run(forward: BoundForward, arena: Arena, deferred: Deferred, declared: Declared, budget: Budget) -> list[Tensor]:
    """What is captured: the forward at a budget, and where its outputs are."""
    parts = _run_parts(forward, arena, deferred, declared, budget)
    return [tensor.detach().resolve_conj().resolve_neg() for tensor in parts.tensors]
