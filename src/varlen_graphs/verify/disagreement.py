"""Replay an example over padding of all kinds, and say where a graph disagrees with what the module gave."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from varlen_graphs.calls.execute import Executor
from varlen_graphs.declaration.call import Call
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_capture import reason_of
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.outputs.parts import Parts, flatten
from varlen_graphs.routing.packing import ReplayBatch
from varlen_graphs.routing.router import Route
from varlen_graphs.stats import Stats
from varlen_graphs.verify.compare import Difference, Example, all_equal, copied, few, limit_of
from varlen_graphs.verify.error_locator import DECLARED, PADDING, REPEATED, ErrorLocator
from varlen_graphs.verify.examples import permuted
from varlen_graphs.verify.operations import random_draw

TOGETHER = (
    "The items of a call act on each other, so an item would change with the others that share its replay. Compute "
    "what they share outside of the module, or let items that belong together form a group."
)

REPEATS = 16
"""Replays that must repeat, bit for bit, before a small change is put down to padding.

Sums in no fixed order, as of `index_add` on a GPU, change in some replays only.
"""

Explain = Callable[[ErrorLocator], str]


class Replays:
    """Replays examples in graphs, and compares the outputs with the expected ones. Counts nothing.

    Args:
        executor: Replays calls.
        forward: The forward of the graphs over a shadow, which eager runs use.
        tolerance: Largest error allowed; `None` is that of the dtype.
        device: The device of the graphs.
        strict: If True, sums whose order is not fixed are wrong, and so is what a rounding error may cause.

    Attributes:
        limit: Largest error allowed.
        error: Largest error so far of an output over NaN.
    """

    def __init__(
        self, executor: Executor, forward: Forward, tolerance: float | None, device: torch.device, strict: bool = False
    ) -> None:
        self._executor = Executor(executor.signature, executor.mode, executor.router, executor.store, Stats())
        self._forward = forward
        self._strict = strict
        self._memory = executor.pool.memory()
        self.limit = limit_of(tolerance, forward, device)
        self.error = 0.0

    def replay(
        self, graphs: GraphSet, batches: Sequence[ReplayBatch], call: Call, filling: Call | None = None
    ) -> Parts:
        """Replay a call over NaN in the pool and in all padding, or over zeros and the rows of `filling`."""
        for memory in self._memory:
            memory.fill_(0 if filling else 0xFF)
        graphs.arena.poison() if filling is None else graphs.arena.fill(filling)
        output = self._executor.replay(replace(call), Route(batches), graphs)
        return flatten(output, self._forward.spec.declared)

    def disagreement(
        self,
        graphs: GraphSet,
        batches: Sequence[ReplayBatch],
        example: Example,
        orders: Sequence[Sequence[range]] = (),
        filling: Call | None = None,
    ) -> Callable[[], str | None]:
        """Queue replays and their comparison; return a function that waits for them.

        It returns where the output is wrong and why; `None` if it is right, whatever padding holds. Others may replay
        before it is called.

        All replays are queued before the first output is read, so that ranks which share a module make the same ones.

        Args:
            graphs: The graphs.
            batches: The replay batches of the example to replay.
            example: The example.
            orders: Groups of its items to replay from the last to the first.
            filling: Call whose rows lie in padding, beside NaN; its own by default.
        """
        call, spec = example.call, self._forward.spec
        fillings, shuffled = (None, filling or call), []
        over_nan, over_rows = (self.replay(graphs, batches, call, one) for one in fillings)
        for groups in orders:
            order, other = permuted(spec, call, example.layout, groups)
            own = [(batch.budget, [at for at, item in enumerate(order) if item in batch.items]) for batch in batches]
            output = self.replay(graphs, [ReplayBatch(budget, items) for budget, items in own if items], other)
            shuffled.append((order, other, output))

        def wrong(item: int, what: str, explain: Explain) -> str:
            batch = next(batch for batch in batches if item in batch.items)
            return self._described(graphs, batch, call, filling or call, what, explain)

        differences = example.compare(over_nan)
        same_bits = copied(all_equal(over_nan.tensors, over_rows.tensors))  # takes fewer launches than a comparison

        def finish() -> str | None:
            found = max(differences())
            if found.error > (limit := self._allowed(found, example, over_nan)):
                what = f"{found.where} differs by {found.error:.1e} from {example.against} (tolerance {limit:.0e})"
                return wrong(found.item, what, lambda locator: locator.explain_error(example, limit))
            first_output = Example(call, over_nan.rebuild(over_nan.tensors))
            if not same_bits() and (found := first_output.furthest(over_rows)).error > 0:
                first = zip((over_nan, over_rows), fillings, strict=True)
                same = all(
                    all_equal(before.tensors, self.replay(graphs, batches, call, filling).tensors)
                    for before, filling in [*first] * REPEATS
                )
                if same or self._strict or found.error > limit:
                    what = f"{PADDING if same else REPEATED}: {found.where} differs by {found.error:.1e}"
                    explain = ErrorLocator.explain_padding if same else ErrorLocator.explain_repetition
                    return wrong(found.item, what, explain)
            for order, other, output in shuffled:
                found = example.furthest(output, other, order)
                if found.error > (limit := self._allowed(found, example, over_nan)):
                    what = f"{len(order)} of its items in another order: {found.where} differs by {found.error:.1e}"
                    return wrong(found.item, f"{what} (tolerance {limit:.0e})", _together)
            return None

        return finish

    def _allowed(self, found: Difference, example: Example, form: Parts) -> float:
        """Return the largest error that is allowed, of which one was found."""
        self.error = max(self.error, found.error)
        return self.limit if self._strict else example.allowed(found, self.limit, self._forward, form)

    def _described(
        self, graphs: GraphSet, batch: ReplayBatch, call: Call, filling: Call, what: str, explain: Explain
    ) -> str:
        """Return a message: where it is wrong, what is, and the cause, located by running eager."""
        layout = call.layout
        assert layout is not None  # noqa: S101 - its items were read
        if batch.budget is None:
            return f"wrong in an eager run of items {few(layout)}: {what}\n{DECLARED}"
        where = f"wrong in {batch.budget}, replaying items {few(batch.layout(layout))}: {what}"
        if not graphs.consensus.alone:  # ranks may take another course each, and then wait for each other
            return f"{where}\nThe cause is not located where ranks share a module."
        try:
            if draw := random_draw(self._forward.module, partial(self._forward.exact, call)):
                return (
                    f"{where}\nThe module draws random numbers, so no two runs agree: {draw}\nCall module.eval() first."
                )
            return f"{where}\n{explain(ErrorLocator(self._forward, graphs.arena, call, batch, filling))}".rstrip()
        except Exception as error:  # of the module's own code, or the device's memory
            return f"{where}\nThe cause could not be located: {reason_of(error)}"


def _together(locator: ErrorLocator) -> str:
    return f"{TOGETHER}\n{locator.explain_together()}"
