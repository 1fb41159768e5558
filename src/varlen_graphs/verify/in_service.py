"""Verify the first calls of each graph in service, and disable budgets whose graphs are wrong."""

import logging
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from varlen_graphs.capture.backend import Graph
from varlen_graphs.capture.mode import Mode
from varlen_graphs.errors import LayoutError, VerificationError
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.options import GpuLayouts
from varlen_graphs.layout.packed_batch import pack_rows, pad_rows
from varlen_graphs.routing.enabled import WRONG_OUTPUT
from varlen_graphs.routing.router import Route, Router
from varlen_graphs.serving.execute import Executor
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.spec.signature import Signature
from varlen_graphs.stats import Stats
from varlen_graphs.verify.compare import Difference, Expected, few, limit_of
from varlen_graphs.verify.options import Verify

LOGGER = logging.getLogger("varlen_graphs")

MORE = "call encoder.release(), then encoder.verify([call]) for details"


class VerifyingExecutor(Executor):
    """An executor that compares the first replays of each graph with the module itself, run eager, if it takes calls.

    A budget whose output differs by more than the tolerance is disabled. If the forward that graphs are captured from
    is wrong eager too, all budgets are disabled.
    """

    def __init__(
        self, signature: Signature, mode: Mode, router: Router, store: GraphStore, stats: Stats, *,
        layouts: GpuLayouts, options: Verify,
    ) -> None:  # fmt: skip
        super().__init__(signature, mode, router, store, stats, layouts=layouts)
        self._options = options
        self._done: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()  # a recaptured graph begins again

    def run(self, call: Call, route: Route, graphs: GraphSet) -> Any:
        """Replay a call, and compare its output if its graphs are still to be verified, which syncs.

        Returns the expected output if that of the replay is wrong.
        """
        if all(self._done.get(graph, 0) >= self._options.calls for graph in _graphs_of(route, graphs)):
            return super().run(call, route, graphs)
        call = self._with_own_rows(call) if call.staged else call
        output = super().run(call, route, graphs)
        try:
            layout = read_layout(self.spec, call)
        except LayoutError:
            return output  # which is NaN, and the graph tells why
        return self._verified(call, layout, route, graphs, output)

    def _with_own_rows(self, call: Call) -> Call:
        """Copy rows that lie in the arena, which the replay may overwrite."""
        packed, layout = self.spec.packed, call.layout
        rows = packed.as_argument(call.rows)
        if layout is not None and layout.length:  # rows past the items were never written
            sizes, padded = [(own,) for own in layout.rows], (layout.length,)
            rows = pad_rows(pack_rows(rows, sizes), sizes, padded)
        rows = rows.clone()
        return replace(call, rows=packed.rows_first(rows), original=call.original | {packed.name: rows})

    def _verified(self, call: Call, layout: Layout, route: Route, graphs: GraphSet, output: Any) -> Any:
        """Return the output if it is right, else the expected one."""
        try:
            reference = self.forward.reference(call)
            expected = Expected(reference.output, layout, call.padded)
            found = self._differences(expected, call, layout, output)
        except Exception as error:  # of the module's own code, or the device's memory
            if self._options.strict:
                raise
            LOGGER.warning("a call of items %s could not be compared with an eager run: %s", few(layout), error)
            for graph in _graphs_of(route, graphs):
                self._count(graph)
            return output
        limit = limit_of(self._options.tolerance, self.forward, call.rows.device)
        wrong: dict[Budget, str] = {}
        for pack in route.packs:
            if pack.budget is not None:
                worst = max(found[item] for item in pack.items)
                right = worst.error <= limit
                if graphs.stand_in is None or not right:  # sizes are too many to count each
                    self.stats.count_check(pack.budget, right, reference.against)
                if right:
                    self._count(graphs[pack.budget])
                else:
                    wrong[pack.budget] = (
                        f"{worst.where} differs by {worst.error:.1e} from {reference.against} (tolerance "
                        f"{limit:.0e}), in a call of items {few(layout)}"
                    )
        if not wrong:
            return output
        exact = self.forward.exact(call)
        self._disable(graphs, wrong, max(self._differences(expected, call, layout, exact)).error <= limit)
        return expected.output

    def _count(self, graph: Graph) -> None:
        self._done[graph] = self._done.get(graph, 0) + 1

    def _differences(self, expected: Expected, call: Call, layout: Layout, output: Any) -> list[Difference]:
        parts = flatten(output, self.spec.declared)
        return expected.differences(parts, layout, range(len(layout)), call.padded)

    def _disable(self, graphs: GraphSet, wrong: dict[Budget, str], forward_is_right: bool) -> None:
        """Disable wrong budgets and log each once; disable all if graphs are not what is wrong."""
        budgets, is_exact = self.store.budgets, graphs.stand_in is not None
        what = "the graph of exactly " if is_exact else ""
        for budget, why in wrong.items():
            if budget not in budgets.disabled:
                LOGGER.error("%s%s is disabled: %s; %s", what, budget, why, MORE)
            if is_exact:  # its calls use the budgets
                graphs.refuse(budget, why)
            else:
                budgets.disable(budget, WRONG_OUTPUT, why)
        if not forward_is_right:
            self.forward.wrong = True
            why = next(iter(wrong.values()))
            LOGGER.error("all budgets are disabled: an eager run of the declared buffers and forward= is wrong too")
            for budget in [*budgets.costs.replays, *(() if is_exact else wrong)]:
                budgets.disable(budget, WRONG_OUTPUT, f"wrong in eager runs too: {why}")
        if self._options.strict:
            budget, why = next(iter(wrong.items()))
            raise VerificationError(f"{what}{budget} is wrong and now disabled: {why}; {MORE}")


def _graphs_of(route: Route, graphs: GraphSet) -> list[Graph]:
    """Return the graphs that a route replays."""
    return [graphs[pack.budget] for pack in route.packs if pack.budget is not None]
