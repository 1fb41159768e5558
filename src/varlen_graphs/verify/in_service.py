"""Verify the first calls of each graph in service, and disable budgets whose graphs are wrong."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.execute import Executor
from varlen_graphs.capture.backend import Graph
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import LayoutError, VerificationError
from varlen_graphs.graphs.forward import Reference
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import pack_rows, pad_rows
from varlen_graphs.options.verify import Verify
from varlen_graphs.outputs.parts import Parts, flatten
from varlen_graphs.routing.enabled import WRONG_OUTPUT
from varlen_graphs.routing.router import Route
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.verify.compare import Difference, Example, few, limit_of

LOGGER = logging.getLogger("varlen_graphs")

MORE = "call encoder.release(), then encoder.verify([call]) for details"


class InService:
    """Compares the first replays of each graph with the module itself, if it takes calls.

    A budget whose output differs by more than the tolerance is disabled. If the forward that graphs are captured from
    is wrong eager too, all budgets are disabled. Items tell nothing for which the module itself gives NaN, and graphs
    numbers: it reads what padding holds, or does not take empty items.

    Args:
        options: `calls`, `strict`, `tolerance` and `at_capture`.

    Attributes:
        calls: Number of calls to compare for each budget; the first one is compared anyway, with `at_capture`.
    """

    def __init__(self, options: Verify) -> None:
        self.calls = options.calls
        self._options = options
        self._done: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()  # a recaptured graph begins again

    def is_due(self, budgets: Sequence[Budget | None], graphs: GraphSet) -> bool:
        """Return True if a graph of these budgets is still to be compared."""
        if self._options.at_capture:
            if len(budgets) > 1 and not graphs.split_is_right:
                return True
            for budget in budgets:  # a loop: a generator costs calls of its own
                if budget and budget not in graphs.compared:
                    return True
        calls = self._options.calls
        return calls > 0 and any(self._done.get(graphs[budget], 0) < calls for budget in budgets if budget is not None)

    def run(self, executor: Executor, call: Call, route: Route, graphs: GraphSet, own: Reference | None) -> Any:
        """Replay a call, and compare its output with the module's own, which is asked for if it is not given. Syncs.

        Returns the expected output if that of the replay is wrong.
        """
        call = _with_own_rows(executor.spec, call) if call.staged else call
        output = executor.replay(replace(call) if own is None else call, route, graphs)
        try:
            layout = read_layout(executor.spec, call)
        except LayoutError:
            return output  # which is NaN, and the graph tells why
        right = self._verified(executor, call, layout, route, graphs, output, own)
        if len(route.batches) > 1:  # once one was wrong, all are compared: the next may be split in another way
            graphs.split_is_right = right is output and graphs.split_is_right is not False
        graphs.compared.update(batch.budget for batch in route.batches if batch.budget is not None)
        return right

    def _verified(
        self,
        executor: Executor,
        call: Call,
        layout: Layout,
        route: Route,
        graphs: GraphSet,
        output: Any,
        own: Reference | None,
    ) -> Any:
        """Return the output if it is right, else the expected one."""
        forward, declared = executor.forward, executor.spec.declared
        try:
            own = run_checked(partial(forward.reference, call), call.rows.device) if own is None else own
            example = Example(replace(call), *own, any_integers=True)
            limit, form = limit_of(self._options.tolerance, forward, call.rows.device), flatten(output, declared)
            found = _differences(example, form, limit)
        except LayoutError:  # an item without rows, where only the GPU knows
            return output
        except Exception as error:  # of the module's own code, or the device's memory
            if self._options.strict:
                raise
            LOGGER.warning("a call of items %s could not be compared with an eager run: %s", few(layout), error)
            for graph in _graphs_of(route, graphs):
                self._count(graph)
            return output
        if max(found).error > limit:  # rounding may do that, as in modules that round activations
            with suppress(Exception):  # of a module that may not run beside the calls
                limit = example.allowed(max(found), limit, forward.on(Shadow(forward.module)), form)
        wrong: dict[Budget, str] = {}
        for batch in route.batches:
            if batch.budget is not None:
                worst = max(found[item] for item in batch.items)
                right = worst.error <= limit
                if batch.budget not in graphs.exact or not right:  # sizes are too many to count each
                    executor.stats.count_check(batch.budget, right, own.against)
                if right:
                    self._count(graphs[batch.budget])
                else:
                    wrong[batch.budget] = (
                        f"{worst.where} differs by {worst.error:.1e} from {own.against} (tolerance "
                        f"{limit:.0e}), in a call of items {few(layout)}"
                    )
        with graphs.consensus.collective_try() as outcome:
            if wrong:
                raise VerificationError(next(iter(wrong.values())))
        if (failure := outcome.take()) is None:
            return output
        if not wrong:  # here, but not on another rank
            wrong = {batch.budget: str(failure.error) for batch in route.batches if batch.budget is not None}
        forward_is_right = False
        with suppress(Exception):
            exact = forward.on(Shadow(forward.module)).exact(replace(call))
            forward_is_right = max(_differences(example, flatten(exact, declared), limit)).error <= limit
        self._disable(executor, graphs, wrong, forward_is_right)
        return example.expected

    def _count(self, graph: Graph) -> None:
        self._done[graph] = self._done.get(graph, 0) + 1

    def _disable(self, executor: Executor, graphs: GraphSet, wrong: dict[Budget, str], forward_is_right: bool) -> None:
        """Disable wrong budgets and log each once; disable all if graphs are not what is wrong."""
        budgets, is_exact = executor.store.budgets, not graphs.exact.keys().isdisjoint(wrong)
        what = "the graph of exactly " if is_exact else ""
        for budget, why in wrong.items():
            if budget not in budgets.disabled:
                LOGGER.error("%s%s is disabled: %s; %s", what, budget, why, MORE)
            if is_exact:  # its calls use the budgets
                graphs.reject(budget, why)
            else:
                budgets.disable(budget, WRONG_OUTPUT, why)
        if not forward_is_right:
            executor.forward.verdict.wrong = True
            why = next(iter(wrong.values()))
            LOGGER.error("all budgets are disabled: an eager run of the declared buffers and forward= is wrong too")
            for budget in [*budgets.costs.replays, *(() if is_exact else wrong)]:
                budgets.disable(budget, WRONG_OUTPUT, f"wrong in eager runs too: {why}")
        if self._options.strict:
            budget, why = next(iter(wrong.items()))
            raise VerificationError(f"{what}{budget} is wrong and now disabled: {why}; {MORE}")


def _graphs_of(route: Route, graphs: GraphSet) -> list[Graph]:
    """Return the graphs that a route replays."""
    return [graphs[batch.budget] for batch in route.batches if batch.budget is not None]


def _differences(example: Example, output: Parts, limit: float) -> list[Difference]:
    """Return the difference of each item; 0 where it is above the limit, but the expected output has the NaN."""
    found = example.differences(output)
    if all(one.error <= limit for one in found):
        return found
    nan = example.nan_items(output)
    return [one._replace(error=0.0) if one.item in nan else one for one in found]


def _with_own_rows(spec: BufferSpec, call: Call) -> Call:
    """Copy rows that lie in the arena, which the replay may overwrite."""
    packed, layout = spec.row_input, call.layout
    rows = packed.as_argument(call.rows)
    if layout is not None and layout.length:  # rows past the items were never written
        sizes, padded = [(own,) for own in layout.rows], (layout.length,)
        rows = pad_rows(pack_rows(rows, sizes), sizes, padded)
    rows = rows.clone()
    return replace(call, rows=packed.rows_first(rows), original=call.original | {packed.name: rows})
