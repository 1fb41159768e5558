"""Graphs of exactly the size of calls, for the sizes that recur."""

from collections import Counter
from threading import Event

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.memory import forget_frames
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import VerificationError, warn
from varlen_graphs.graphs.graph_capture import reason_of
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.store import GraphStore, Key
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.packing import ReplayBatch, cheapest
from varlen_graphs.routing.recent import RECENT
from varlen_graphs.routing.router import Route

LEAST_CALLS = 4
"""Number of recent calls from which a size is worth a graph."""

MUCH_MORE = 2
"""Ratio of recent calls at which a size takes the place of another one's graph."""

Size = tuple[Key, Budget]
"""The exact size of calls, and the key of the graphs that they use."""


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
        self._calls: Counter[Size] = Counter()  # recent ones
        self._left_out: set[Size] = set()
        self._losses = 0

    def route(self, call: Call, graphs: GraphSet | None) -> Route | None:
        """Count a call; return the route to the graph of its size, if there is one among these graphs."""
        layout = call.layout
        if layout is None or call.staged:
            return None
        size = self._store.forward.spec.exact_budget(layout)
        is_missing = graphs is None or size not in graphs.exact
        self._count((self._store.key(call.key), size), is_missing)
        if is_missing or self._store.forward.verdict.wrong:
            return None
        return Route((ReplayBatch(size, range(len(layout.items))),))

    def capture_next(self) -> Budget | None:
        """Capture the size that came most often and has no graph; return it, or `None` if there is none to capture.

        If there is no room for one more, the graph whose size came least makes room.

        Raises:
            InputError: This thread stages rows, or computes a host buffer for a call.
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`.
            VerificationError: The graph failed verification, with `strict`.
        """
        store = self._store
        if self._losses != store.losses:  # released: what failed may be tried again
            self._losses = store.losses
            self._left_out.clear()
        captured = store.exact
        least = min(captured, key=self._calls.__getitem__, default=None)
        if (found := self._next(captured, least)) is None:
            return None
        store.check_free()
        store.check_memory()
        if self._losses != store.losses:  # it had changed, and all was released
            return None
        one, fallback = found
        if least is not None and not self._has_room(captured, fallback):
            store.drop_exact(*least)
        self._capture(one, fallback)
        return one[1]

    def _next(self, captured: list[Size], least: Size | None) -> tuple[Size, Budget] | None:
        """Return the most frequent size to capture, and the budget that its calls use now.

        Where there is no room for one more graph, one that came much more often than `least`, which has one.
        """
        for one, calls in self._calls.most_common():
            if calls < LEAST_CALLS:
                break
            if one in self._left_out or (fallback := self._fallback(one)) is None:
                continue
            if self._has_room(captured, fallback) or (least is not None and calls >= MUCH_MORE * self._calls[least]):
                return one, fallback
        return None

    def _fallback(self, one: Size) -> Budget | None:
        """Return the budget that calls of a size use; `None` if it has a graph, or none can be captured for it now."""
        store, (key, size) = self._store, one
        graphs, costs = store.find(key[0]), store.budgets.costs
        if not graphs or not graphs.lacks(size) or size in costs.replays or not graphs.arena.holds(size):
            return None
        if store.forward.verdict.wrong or not store.consensus.alone or not store.can_capture(key, graphs.inputs):
            return None
        return cheapest(Usage(*size), costs)

    def _has_room(self, captured: list[Size], fallback: Budget) -> bool:
        """Return True if there may be one more graph, which takes no more memory than that of the budget."""
        store = self._store
        if len(captured) >= self._most:
            return False
        return store.limit is None or store.bytes() + store.own_bytes().get(fallback, 0) <= store.limit.most

    def _capture(self, one: Size, fallback: Budget) -> None:
        """Capture a size; leave it out if that fails, or takes too much memory."""
        store, (key, size) = self._store, one
        try:
            store.capture_exact(key, size, fallback)
        except VerificationError:
            raise
        except Exception as error:  # of the module's own code, or the device's memory: calls have the budgets
            self._left_out.add(one)
            forget_frames(error)
            warn(
                f"no graph of exactly {size.rows} rows could be captured, so such calls go on with budgets: "
                f"{reason_of(error)}"
            )
            return
        if store.limit is not None and store.bytes() > store.limit.most:
            self._left_out.add(one)
            store.drop_exact(key, size)

    def _count(self, one: Size, is_missing: bool) -> None:
        self._counted += 1
        if self._counted > RECENT:
            self._counted = 1
            self._calls = Counter({size: calls // 2 for size, calls in self._calls.items() if calls > 1})
        self._calls[one] = calls = self._calls[one] + 1
        # Not at each call, because a size may be waiting for good: at 4, 8, 16, ... of them.
        if is_missing and calls >= LEAST_CALLS and (calls & (calls - 1) == 0 or self._losses != self._store.losses):
            self._pending.set()
