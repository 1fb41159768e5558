"""A call as replays: rows and items in, graphs, outputs out."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import Graphs
from varlen_graphs.graphs.store import Captured
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.span import Span
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.planner import Planner
from varlen_graphs.serving.borrowed import Borrowed, Lent
from varlen_graphs.serving.collect import Collected
from varlen_graphs.serving.staging import Stage, staged
from varlen_graphs.spec.call import Call, StaticKey, static_key
from varlen_graphs.spec.outputs import flatten, with_padding
from varlen_graphs.stats import Stats

TOO_LARGE = "larger than every budget"
TOO_LARGE_IN_USE = "larger than every budget in use"
EAGER_IS_FASTER = "faster without padding"


def planned_again(packs: Sequence[Pack], layout: Layout, planner: Planner, graphs: Graphs) -> Sequence[Pack]:
    """The replays of a call; others than were planned if a budget has no graph, or went out of use since then."""
    usable = graphs.usable(planner.costs)
    if all(one.budget is None or one.budget in usable.replays for one in packs):
        return packs
    return planner.packs(layout, usable)


class Replays:
    """Answers calls with graphs. Each call has the pool's turn from its first copy in to its last copy out.

    Args:
        captured: Where graphs come from.
        planner: Plans anew where a budget went out of use after a call was planned.
        forward: Runs the items that no budget holds.
        pool: Whose turn it is.
        stats: Counts.
        lends: Whether the output of a call that is one replay stays in the memory of its graph.

    Attributes:
        used: How often each budget was replayed, by the static arguments of the calls.
    """

    def __init__(
        self, captured: Captured, planner: Planner, forward: Forward, pool: Pool, stats: Stats, lends: bool
    ) -> None:
        self.used: defaultdict[StaticKey, Counter[Budget]] = defaultdict(Counter)
        self._captured = captured
        self._planner = planner
        self._forward = forward
        self._pool = pool
        self._stats = stats
        self._lends = lends

    def run(self, call: Call, layout: Layout, packs: Sequence[Pack], backend: Backend) -> Any:
        """Replay a call whose items the host knows: its output, or a `Borrowed` if outputs are lent.

        Raises:
            NoBudgetError: There are no graphs for it, and no budget is in use any more.
        """
        with torch.no_grad(), on_device(call.rows.device), self._pool.exclusive():
            return self._run(self._graphs(call, call.rows, backend), call, layout, packs)

    def _run(self, graphs: Graphs, call: Call, layout: Layout, packs: Sequence[Pack]) -> Any:
        rows, collected = call.rows, Collected(Span.of(layout))
        if not self._planner.in_use.settled:
            packs = planned_again(packs, layout, self._planner, graphs)
        for one in packs:
            part, spans = one.layout(layout), one.spans(layout)
            if one.budget is None:
                outputs = self._run_eager(call, part, spans[0][0])
            else:
                graphs.arena.load_rows(rows, spans, one.budget)
                graphs.arena.load_layout(part, one.budget)
                outputs = self._replay(graphs, call, one.budget, part.total)
                if self._lends and not call.length and spans[0][0] == collected.everything:
                    return Lent(graphs, outputs, collected.everything, self._pool)
            collected.take(outputs, graphs.extents, spans)
        tensors = with_padding(collected.tensors, graphs.extents, layout.rows, call.length)
        output = graphs.rebuild(tensors)
        return Borrowed(output) if self._lends else output

    def run_unseen(self, call: Call, budget: Budget, backend: Backend) -> Any:
        """Replay a call whose items are described on the GPU, and fit this budget unless they are wrong.

        Raises:
            NoBudgetError: As for `run`.
        """
        rows, items = call.rows, call.items
        collected = Collected(Span(0, rows.shape[0], 0, items))
        spans = [(collected.everything, collected.everything)]
        with torch.no_grad(), on_device(rows.device), self._pool.exclusive():
            graphs = self._graphs(call, rows, backend)
            if not self._planner.in_use.settled and budget not in graphs.usable(self._planner.costs).replays:
                layout = self._forward.spec.read_layout(call.description, rows.shape)
                return self._run(graphs, call, layout, self._planner.packs(layout))
            deferred = self._captured.deferred
            assert deferred is not None  # noqa: S101 - graphs have one
            deferred.calls += 1
            graphs.arena.load_rows(rows, spans, budget)
            graphs.arena.load_table(call.description, deferred.calls, items, rows.shape[0], budget)
            # A call that is wrong must not pass for one that is right.
            collected.take(self._replay(graphs, call, budget, rows.shape[0]), graphs.extents, spans, deferred.veils)
            deferred.fetch()
            output = graphs.rebuild(collected.tensors)
        return Borrowed(output) if self._lends else output

    @contextmanager
    def stage(
        self,
        call: Call,
        layout: Layout,
        backend: Backend,
        checked: Callable[[Budget, Tensor, Callable[[], Any]], Any] | None = None,
    ) -> Iterator[Stage | None]:
        """The pool's turn for a call whose rows the caller writes inside the block; those of `call` are an example.

        `None` where the budgets that would hold the items are out of use. `checked` is given the budget, the rows and
        what replays them, and returns the output.
        """
        collected = Collected(Span.of(layout))
        with torch.no_grad(), on_device(call.rows.device), self._pool.exclusive():
            budget = self._planner.whole(layout)
            if budget is not None:
                graphs = self._graphs(call, call.rows, backend)
                # A capture may have put it out of use.
                budget = self._planner.whole(layout, graphs.usable(self._planner.costs))
            if budget is None:
                yield None
                return

            def run() -> Any:
                self._captured.staged = False
                graphs.arena.load_layout(layout, budget)
                outputs = self._replay(graphs, call, budget, layout.total)
                collected.take(outputs, graphs.extents, [(collected.everything, collected.everything)])
                return graphs.rebuild(collected.tensors)

            self._captured.staged = True
            try:
                rows = self._forward.spec.packed.as_argument(graphs.arena.part(collected.everything, budget))
                with staged(rows, partial(checked, budget, rows, run) if checked else run) as stage:
                    yield stage
            finally:
                self._captured.staged = False

    @property
    def too_large(self) -> str:
        """Why an item runs without a graph."""
        in_use = self._planner.in_use
        return in_use.why_none or (TOO_LARGE_IN_USE if in_use.out else TOO_LARGE)

    def tell_deferred(self) -> None:
        """Raise what was wrong with layouts that only the GPU has seen, as far as it is known by now.

        Raises:
            LayoutError: Something was.
            StaleGraphError: The graphs are those of a process from which this one was forked.
        """
        self._pool.check_process()
        if self._captured.deferred is not None:
            self._captured.deferred.tell()

    def _graphs(self, call: Call, rows: Tensor, backend: Backend) -> Graphs:
        """What answers a call. From here on its memory is written, which voids what was lent of it."""
        self._pool.advance()
        row_shape = self._forward.spec.row_extent.rest(rows)
        graphs = self._captured.graphs(call.statics, row_shape, rows.device, backend)
        graphs.arena.check(rows)
        return graphs

    def _replay(self, graphs: Graphs, call: Call, budget: Budget, active: int) -> list[Tensor]:
        """Replay what is in the arena."""
        self._stats.count_replay(budget, active)
        self.used[static_key(call.statics)][budget] += 1
        return graphs.replay(budget)

    def _run_eager(self, call: Call, part: Layout, where: Span) -> list[Tensor]:
        """Run the one item of a pack without a graph."""
        self._stats.count_eager(self.too_large)
        spec = self._forward.spec
        output = self._forward.exact(spec.row_extent.part(call.rows, where), part, call.statics)
        return flatten(output, spec.declared).tensors
