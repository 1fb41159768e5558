"""Graphs of exactly the size of calls, for the sizes that recur."""

from collections import Counter
from collections.abc import Iterator
from threading import Event

from varlen_graphs.capture.memory import forget_frames
from varlen_graphs.errors import VerificationError, warn
from varlen_graphs.graphs.capturer import CaptureInputs, Key
from varlen_graphs.graphs.graph_set import reason_of
from varlen_graphs.graphs.store import GraphStore, Usable
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.needs import Load
from varlen_graphs.routing.packing import Pack, cheapest
from varlen_graphs.routing.router import Route
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.statics import StaticKey

LEAST_CALLS = 4
"""Number of calls of late from which a size is worth a graph."""

MUCH_MORE = 2
"""How many times as often as another one a size must come to take the place of its graph."""

RECENT = 1000
"""Number of calls after which earlier ones count half."""

Size = tuple[Key, Budget]
"""The size of a call, at which it would run eager, and the key of the graphs that it uses."""


class ExactGraphs:
    """Graphs of exactly the size of calls, which replay without padding, at most so many.

    They lie beside the graphs of the budgets: in the same arena and pool, but never chosen for other calls, nor timed,
    and dropped first where memory is limited. Calls whose items only the GPU has seen, and stages, do not use them. To
    be used in the pool's turn.

    Args:
        store: Holds the graphs.
        most: Number of graphs at a time, of all static arguments together.
        pending: Set when there may be one to capture.
    """

    def __init__(self, store: GraphStore, most: int, pending: Event) -> None:
        self._store = store
        self._most = most
        self._pending = pending
        self._counted = 0
        self._calls: Counter[Size] = Counter()  # counts of late
        self._inputs: dict[Key, CaptureInputs] = {}
        self._left_out: set[Size] = set()
        self._losses = 0

    def route(self, call: Call, usable: Usable) -> tuple[Usable, Route] | None:
        """Count a call; return the graphs of exact sizes and its route there, if one of them has its size."""
        layout = call.layout
        if layout is None or call.staged:
            return None
        size = self._store.forward.spec.exact_budget(layout)
        key = self._store.key(call.key)
        graphs = self._store.capturer.exact.get(key)
        found = graphs is not None and size in graphs
        self._count((key, size), None if found else call)
        if not found or self._store.forward.wrong:
            return None
        return usable._replace(graphs=graphs), Route((Pack(size, range(len(layout.items))),))

    def stand_ins(self) -> Iterator[tuple[StaticKey, Budget, int]]:
        """Return the budgets that calls of sizes with a graph would use without it, and how often they came of late."""
        for (key, size), calls in [*self._calls.items()]:  # other threads change them
            exact = self._store.capturer.exact.get(key)
            budget = cheapest(Load(*size), self._store.budgets.costs)
            if exact is not None and size in exact and budget is not None:
                yield key[0], budget, calls

    def capture_next(self) -> Budget | None:
        """Capture the size that came most often and has no graph; return it, or `None` if there is none to capture.

        If there are too many graphs then, the one whose size came least is dropped.

        Raises:
            InputError: This thread stages rows, or computes a host buffer for a call.
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`.
            VerificationError: The graph failed the proof, with `strict`.
        """
        store, capturer = self._store, self._store.capturer
        store.check_not_staged()
        capturer.check_not_loading()
        store.check_memory()
        held = [(key, size) for key, graphs in capturer.exact.items() for size in graphs.budgets]
        least = min(held, key=self._calls.__getitem__) if len(held) >= self._most else None
        if (one := self._next(least)) is None:
            return None
        key, size = one
        self._left_out.add(one)  # until there is a graph
        self._capture(key, size)
        if (graphs := capturer.exact.get(key)) is not None and size in graphs:
            if store.limit is not None and store.bytes() > store.limit.most:
                self._drop(key, size)
                return size
            self._left_out.discard(one)
            if least is not None:
                self._drop(*least)
        return size

    def _next(self, least: Size | None) -> Size | None:
        """Return the most frequent size to capture; if there is no room, one that came much more often than `least`."""
        if self._losses != self._store.losses:  # released: what failed may be tried again
            self._losses = self._store.losses
            self._left_out.clear()
        enough = LEAST_CALLS if least is None else max(LEAST_CALLS, MUCH_MORE * self._calls[least])
        for one, calls in self._calls.most_common():
            if calls < enough:
                break
            if one not in self._left_out and self._may_capture(*one):
                return one
        return None

    def _may_capture(self, key: Key, size: Budget) -> bool:
        """Return True if a size has no graph, and a capture now may give it one that its calls use."""
        store, capturer = self._store, self._store.capturer
        graphs, exact = capturer.sets.get(key), capturer.exact.get(key)
        if not graphs or size in store.budgets.costs.replays or not graphs.arena.holds(size):
            return False
        if exact is not None and not exact.lacks(size):
            return False
        return capturer.agreement.alone and not store.forward.wrong and store.can_capture(key, self._inputs[key])

    def _capture(self, key: Key, size: Budget) -> None:
        """Capture a size; warn if that fails."""
        capturer = self._store.capturer
        try:
            capturer.capture(key, self._inputs[key], [size], exact=True)
            reason = capturer.exact[key].failed.get(size)
        except VerificationError:
            raise
        except Exception as error:
            reason = reason_of(error)
            forget_frames(error)
        if reason is not None:
            warn(f"no graph of exactly {size.rows} rows could be captured, so such calls go on with budgets: {reason}")

    def _drop(self, key: Key, size: Budget) -> None:
        """Drop a graph once it has run."""
        self._store.pool.synchronize()
        self._store.pool.advance()
        self._store.capturer.exact[key].drop(size)

    def _count(self, one: Size, missing: Call | None) -> None:
        """Count a call, whose size has no graph if it is given."""
        self._counted += 1
        if self._counted > RECENT:
            self._counted = 1
            self._calls = Counter({size: calls // 2 for size, calls in self._calls.items() if calls > 1})
            kept = {key for key, _ in self._calls}
            self._inputs = {key: inputs for key, inputs in self._inputs.items() if key in kept}
        self._calls[one] = calls = self._calls[one] + 1
        if missing is not None:
            self._inputs[one[0]] = self._store.inputs(missing)
            if calls >= LEAST_CALLS and calls & (calls - 1) == 0:  # 4, 8, 16, ...
                self._pending.set()
