"""Why a replay is wrong, as far as runs of the same forward without a graph tell."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layout.span import Span
from varlen_graphs.routing.packing import Pack
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import clear_gaps, flatten
from varlen_graphs.verify.compare import Expected, close, equal
from varlen_graphs.verify.operations import first_difference

FROZEN = (
    "The same code on the same padded memory gives the right output without a graph, so the graph holds something that "
    "is another one now: a Python number or branch, a cache, or code that was compiled. Compute it from the items, in "
    "a declared buffer."
)
DECLARED = (
    "The declared buffers and forward= give this without a graph and without padding too: they compute something else "
    "than the module itself."
)
MEMORY = (
    "Without a graph nothing differs, so a replay reads memory that it did not write: a tensor made with empty(), or a "
    "cache that was filled during the capture."
)
STATE = (
    "The module itself gives another output when the same call is repeated: it keeps something from call to call, or "
    "draws random numbers. Call module.eval(), and compute anew in each call what depends on the call."
)
REPEATED = "two replays of one call over the same memory differ"
PADDING = "what padding holds changes active rows"
REMEDY = (
    "Rows may mix only through declared buffers: attention over cu_seqlens, gathers by declared indices, sums by item "
    "with padding left out."
)


class Diagnosis:
    """Runs the forward of one replay without a graph: at its budget over two kinds of padding, and without padding.

    Changes the arena: NaN is left in its padding.

    Args:
        forward: Runs it.
        arena: What graphs read.
        call: The call.
        pack: The items that are replayed, and their budget.
        filling: Rows that padding holds in the one run; NaN in the other.
    """

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        call: Call,
        pack: Pack,
        filling: Tensor,
    ) -> None:
        layout, budget = call.layout, pack.budget
        assert layout is not None  # noqa: S101 - the call was bound for verification
        assert budget is not None  # noqa: S101 - it was replayed
        self._forward = forward
        self._statics = call.statics
        self._part = pack.layout(layout)
        spans = pack.spans(layout, Span.of(layout))
        arena.load_layout(self._part, budget)
        own, self._table, self._host = arena.view(budget)
        self._padded = []
        for fill in (partial(arena.fill, filling), arena.poison):
            fill()
            arena.load_rows(call.rows, spans, budget)
            self._padded.append(own.clone())
        self._active = arena.part(Span.of(self._part), budget).clone()

    def of_error(self, expected: Expected, items: Sequence[int], limit: float) -> str:
        """Why a replay of these items is further than `limit` from what the module itself gives of them."""

        def is_right(output: Any, clear: bool) -> bool:
            parts = flatten(output, self._forward.spec.declared)
            if clear:
                clear_gaps(parts, self._table)
            return expected.furthest(parts, self._part, items).error <= limit

        if is_right(self._at_budget(1), clear=True):
            return FROZEN
        if not is_right(self._exact(), clear=False):
            return DECLARED
        found = first_difference(
            self._forward.module, self._exact, self._exact, partial(self._at_budget, 1), partial(close, limit=limit)
        )
        if found is None:
            return self.of_padding()
        return f"Without padding it is right. The first operation that is not, at the budget, is {found}\n{REMEDY}"

    def of_padding(self) -> str:
        """Why a replay depends on what padding holds."""
        one, other = (partial(self._at_budget, which) for which in range(2))
        found = first_difference(self._forward.module, self._exact, one, other, equal)
        if found is None:
            return MEMORY
        return f"The first operation whose active rows change with the padding is {found}\n{REMEDY}"

    def of_repetition(self) -> str:
        """Why two replays over the same memory differ."""
        run = partial(self._at_budget, 1)
        found = first_difference(self._forward.module, self._exact, run, run, equal)
        if found is None:
            return MEMORY
        return (
            f"The first operation that gives something else when it is repeated is {found}\nThe module changes state "
            "in place, or the order of its sums is not fixed; see torch.use_deterministic_algorithms."
        )

    def _at_budget(self, which: int) -> Any:
        return self._forward(self._padded[which].clone(), self._table, self._host, self._statics)

    def _exact(self) -> Any:
        return self._forward.exact(self._active.clone(), self._part, self._statics)
