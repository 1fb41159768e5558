"""Verify the first calls of each graph in service, and disable budgets whose graphs are wrong."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import LayoutError, VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import Captured, Key
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.padded import pack_rows, pad_rows
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.planner import Planner
from varlen_graphs.serving.borrowed import Borrowed
from varlen_graphs.serving.replay import planned_again
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.stats import Stats
from varlen_graphs.verify.compare import Difference, Expected, few, limit_of
from varlen_graphs.verify.options import Verify

LOGGER = logging.getLogger("varlen_graphs")

MORE = "call encoder.release(), then encoder.verify([call]) for details"


class InService:
    """Compares the outputs of replays with those of the module itself, run eager.

    Disables budgets whose output differs by more than the tolerance; if an eager run of the captured forward is wrong
    too, all budgets.
    """

    def __init__(
        self,
        options: Verify,
        captured: Captured,
        forward: Forward,
        planner: Planner,
        pool: Pool,
        stats: Stats,
    ) -> None:
        self._distrusted = -1
        self._calls = options.calls
        self._strict = options.strict
        self._tolerance = options.tolerance
        self._captured = captured
        self._forward = forward
        self._planner = planner
        self._pool = pool
        self._stats = stats
        self._done: Counter[tuple[int, Key, Budget | None, int]] = Counter()  # a recapture starts over

    def run(self, call: Call, packs: Sequence[Pack], replay: Callable[[], Any], layout: Layout | None = None) -> Any:
        """Replay a call, and compare its output if its graph still has calls to verify; a comparison syncs.

        `packs` were planned earlier: the replay uses other budgets for those disabled since then. `layout` is `None` if
        the items are on the GPU; a comparison copies them to the host. A wrong output is replaced by that of the module
        itself, or raises `VerificationError` with `strict`.
        """
        with torch.no_grad(), self._pool.exclusive():
            budgets = {one.budget for one in packs if one.budget is not None}
            if not (self._is_due(call, budgets) or self._any_without(call, budgets)):
                return replay()
            output = replay()
            graphs = self._captured.find(call.statics)
            if graphs is None:
                return output  # of an eager run: the memory limit evicted the graphs that the call captured
            if layout is None:
                try:
                    layout = self._forward.spec.read_layout(call.description, call.rows.shape)
                except LayoutError:
                    return output  # NaN; the checks of the graph report why
            if not self._planner.in_use.settled:
                packs = planned_again(packs, layout, self._planner, graphs)  # the replay may have captured
            came = output.output if isinstance(output, Borrowed) else output
            right = self._compared(call, layout, packs, came)
            if right is came:
                return output
            return Borrowed(right) if isinstance(output, Borrowed) else right

    def run_stage(self, call: Call, layout: Layout, budget: Budget, rows: Tensor, replay: Callable[[], Any]) -> Any:
        """Replay a stage, and compare it if due. The caller has written `rows` in the shape of the argument."""
        if not self._is_due(call, {budget}):
            return replay()
        packed = self._forward.spec.packed
        if layout.length:  # rows past the items were never written
            rows = pad_rows(pack_rows(rows, layout.rows), layout.rows, layout.length)
        rows = rows.clone()
        call = replace(call, rows=packed.rows_first(rows), original=call.original | {packed.name: rows})
        return self.run(call, [Pack(budget, range(len(layout)))], replay, layout)

    @property
    def distrusts_forward(self) -> bool:
        """True if an eager run of the captured forward was wrong too."""
        return self._distrusted == self._captured.releases

    def _is_due(self, call: Call, budgets: Iterable[Budget]) -> bool:
        """Return True if some graph of a call was verified with fewer than `calls` calls."""
        return any(self._done[self._graph_of(call, budget)] < self._calls for budget in budgets)

    def _any_without(self, call: Call, budgets: Iterable[Budget]) -> bool:
        """Return True if one of these budgets was disabled, or lost its graph."""
        graphs = None if self._planner.in_use.settled else self._captured.find(call.statics)
        usable = graphs and graphs.usable(self._planner.costs).replays
        return usable is not None and any(budget not in usable for budget in budgets)

    def _graph_of(self, call: Call, budget: Budget | None) -> tuple[int, Key, Budget | None, int]:
        """Identify the graph of a call at a budget."""
        graphs = self._captured.find(call.statics)
        times = graphs.times[budget] if graphs is not None and budget is not None else 0
        return self._captured.losses, self._captured.key(call.statics), budget, times

    def _compared(self, call: Call, layout: Layout, packs: Sequence[Pack], output: Any) -> Any:
        """Compare an output, and return it if it is right; else the output of the module itself."""
        try:
            expected = Expected(self._forward.reference(call, layout), layout, call.length)
            found = self._differences(expected, call, layout, output)
        except Exception as error:  # of the module's own code, or the device's memory
            if self._strict:
                raise
            LOGGER.warning("a call of items %s could not be compared with the module itself: %s", few(layout), error)
            self._done.update(self._graph_of(call, one.budget) for one in packs)
            return output
        limit = limit_of(self._tolerance, self._forward, call.rows.device)
        wrong: dict[Budget, str] = {}
        for one in packs:
            if one.budget is not None:
                worst = max(found[item] for item in one.items)
                right = worst.error <= limit
                self._stats.count_check(one.budget, right)
                if right:
                    self._done[self._graph_of(call, one.budget)] += 1
                else:  # stays due for calls of other threads that were planned before
                    wrong[one.budget] = (
                        f"{worst.where} differs by {worst.error:.1e} from the module's own output (tolerance "
                        f"{limit:.0e}), in a call of items {few(layout)}"
                    )
        if not wrong:
            return output
        exact = self._forward.exact(call.rows.clone(), layout, call.statics, length=call.length)
        self._refuse(wrong, max(self._differences(expected, call, layout, exact)).error <= limit)
        return expected.output

    def _differences(self, expected: Expected, call: Call, layout: Layout, output: Any) -> list[Difference]:
        parts = flatten(output, self._forward.spec.declared)
        return expected.differences(parts, layout, range(len(layout)), call.length)

    def _refuse(self, wrong: dict[Budget, str], forward_is_right: bool) -> None:
        """Disable wrong budgets, or all if the captured forward itself is wrong. Logs each budget once."""
        in_use = self._planner.in_use
        for budget, why in wrong.items():
            if budget not in in_use.out:
                LOGGER.error("%s is disabled: %s; %s", budget, why, MORE)
            in_use.put_out(budget, why)
        if not forward_is_right:
            self._distrusted = self._captured.releases
            why = next(iter(wrong.values()))
            LOGGER.error("all budgets are disabled: an eager run of the declared buffers and forward= is wrong too")
            for budget in [*in_use.costs.replays, *wrong]:
                in_use.put_out(budget, f"wrong in eager runs too: {why}")
        if self._strict:
            budget, why = next(iter(wrong.items()))
            raise VerificationError(f"{budget} is wrong and now disabled: {why}; {MORE}")
