"""Budgets that calls request, to be captured between calls: meanwhile they use other budgets, or run eager."""

from collections.abc import Collection, Mapping
from threading import Event, RLock
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.memory import forget_frames
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import warn
from varlen_graphs.graphs.graph_capture import reason_of
from varlen_graphs.graphs.graph_set import CaptureInputs
from varlen_graphs.graphs.store import GraphStore, Key
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.packing import total_cost
from varlen_graphs.routing.recent import Recent
from varlen_graphs.routing.router import OnMiss, Route, Router
from varlen_graphs.stats import Stats

NOT_CAPTURED = "not captured yet"
CAPTURING = "a graph was being captured"

MOST_KEYS = 64
"""Number of sets of static arguments and adapters whose requests are kept."""

LITTLE_MORE = 1.5
"""Largest ratio of costs at which other budgets stand in, while the cost of an eager call is not known."""


class _Request(NamedTuple):
    """Budgets that calls with some static arguments requested.

    Attributes:
        inputs: The inputs to capture for.
        calls: Number of recent calls that requested each budget.
        from_file: True if no call has requested any, but a warm-up file.
    """

    inputs: CaptureInputs
    calls: Recent
    from_file: bool


class Requests:
    """Budgets that calls requested but that have no graph yet.

    Args:
        store: Captures them.
        stats: Tells how many calls there were.
        pending: Set when calls request something.

    Attributes:
        store: As given.
        asked: True once somebody has asked to capture them.
    """

    def __init__(self, store: GraphStore, stats: Stats, pending: Event) -> None:
        self.store = store
        self.asked = False
        self._pending = pending
        self._stats = stats
        self._requests: dict[Key, _Request] = {}
        self._lock = RLock()  # a signal handler may interrupt who holds it

    def add(self, inputs: CaptureInputs, calls: Mapping[Budget, float], from_file: bool = False) -> None:
        """Count that calls requested budgets just now, or did in an earlier run, as a warm-up file says."""
        with self._lock:
            key = self.store.key(self.store.forward.spec.key(inputs.static_args, inputs.row_shape))
            request = self._requests.get(key) or _Request(inputs, Recent(), from_file)
            self._requests[key] = request = request._replace(from_file=from_file and request.from_file)
            request.calls.count(calls, self._stats.calls)
            if len(self._requests) > MOST_KEYS:  # drop what was requested least, and longest ago
                del self._requests[min(self._requests, key=lambda key: sum(self._requests[key].calls.values()))]
        self._pending.set()

    def capture_next(self) -> Budget | None:
        """Capture the most requested budget, in the pool's turn; return it, or `None` if there is none.

        Captures nothing that was requested in another mode of the module, or with other adapters, than it has now. What
        a warm-up file alone requested, and fails, is forgotten with a warning: the file may be of something else.

        Raises:
            InputError: This thread is inside a stage.
            CaptureError, StaleGraphError, and errors of the module: As for a call that captures.
        """
        self.asked = True
        while (one := self._next()) is not None:
            key, inputs, budget, calls = one
            graphs = self.store.find(key[0])
            missing = graphs is None or budget not in graphs
            if missing:
                try:
                    self.store.capture(inputs, [budget], calls)
                except Exception as error:
                    if not self._forget_of_file(key):
                        raise
                    forget_frames(error)
                    self.store.failure = None  # no call asked for it
                    warn(
                        f"what calls with {quoted(inputs.static_args)} used, as the warm-up file says, cannot be "
                        f"captured, and is forgotten: {reason_of(error)}"
                    )
                    continue
            self._forget(key, budget)
            if missing:
                return budget
        return None

    def _next(self) -> tuple[Key, CaptureInputs, Budget, float] | None:
        """Return the most requested budget of those that can be captured now."""
        with self._lock:
            for request in self._requests.values():
                request.calls.count({}, self._stats.calls)
            requests = [
                (calls, key, request.inputs, budget)
                for key, request in self._requests.items()
                for budget, calls in request.calls.items()
                if budget in self.store.budgets.costs.replays
            ]
        for calls, key, inputs, budget in sorted(requests, key=lambda one: one[0], reverse=True):
            wanted = self.store.why_not(key, inputs.static_args) is None
            if wanted and self.store.can_capture(key, inputs) and self.store.admits(budget, calls):
                return key, inputs, budget, calls
        return None

    def _forget_of_file(self, key: Key) -> bool:
        """Remove a request that a warm-up file alone made; return True if it was one."""
        with self._lock:
            request = self._requests.get(key)
            if request is None or not request.from_file:
                return False
            del self._requests[key]
            return True

    def _forget(self, key: Key, budget: Budget) -> None:
        """Remove a budget that has a graph now, or cannot have one."""
        with self._lock:
            request = self._requests.get(key)
            if request is not None:  # it may have been dropped
                request.calls.pop(budget, None)
                if not request.calls:
                    del self._requests[key]


class LazyRouter(Router):
    """A router for an encoder whose calls never capture.

    A call that wants a budget without a graph requests it, and uses other budgets if that is no slower than eager. No
    call waits for a capture, not even of another encoder of the pool.

    Args:
        spec, budgets, on_miss, min_segment_rows: As for `Router`.
        requests: Takes the requests.
    """

    def __init__(
        self,
        spec: BufferSpec,
        budgets: EnabledBudgets,
        on_miss: OnMiss,
        min_segment_rows: int,
        requests: Requests,
    ) -> None:
        super().__init__(spec, budgets, on_miss, min_segment_rows)
        self.requests = requests

    def why_wait(self, call: Call) -> str | None:
        """Request the budgets of a call and return a reason, if the pool is busy with a capture."""
        if not self.requests.store.pool.busy:
            return None
        graphs = self.requests.store.find(call.key)
        rejected = () if graphs is None else graphs.rejected
        route = super().route(call, self.budgets.costs.without(rejected), False, rejected)
        if not route.batches:
            return route.reason
        self._request(call, route, () if graphs is None else graphs.budgets)
        return CAPTURING

    def route(self, call: Call, costs: Costs, timed: bool, rejected: Collection[Budget] = ()) -> Route:
        """Choose replay batches among all enabled budgets; if some have no graph, among those in `costs`."""
        enabled = self.budgets.costs.without(rejected)
        best = super().route(call, enabled, timed, rejected)
        if not best.batches or not self._request(call, best, costs.replays):
            return best
        other = super().route(call, costs, timed, rejected)
        if not other.batches or any(batch.budget is None for batch in other.batches):
            return Route(reason=NOT_CAPTURED)
        if timed and costs.measured:  # then the router has compared it with eager
            return other
        close = total_cost(other.batches, costs) <= LITTLE_MORE * total_cost(best.batches, enabled)
        return other if close else Route(reason=NOT_CAPTURED)

    def _request(self, call: Call, route: Route, captured: Collection[Budget]) -> bool:
        """Request the budgets of a route that have no graph; return True if there are some."""
        missing = {batch.budget for batch in route.batches if batch.budget is not None and batch.budget not in captured}
        if missing:
            self.requests.add(self.requests.store.inputs(call), dict.fromkeys(missing, 1))
        return bool(missing)
