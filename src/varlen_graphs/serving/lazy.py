"""Budgets that calls want and that have no graph yet: how calls run meanwhile, and which to capture next."""

from collections.abc import Mapping, Sequence
from threading import Event, Lock
from typing import NamedTuple

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.pool import Pool
from varlen_graphs.graphs.graph_set import Graphs
from varlen_graphs.graphs.store import Basis, Captured, Key
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.packing import Pack, total_cost
from varlen_graphs.routing.planner import Planner
from varlen_graphs.routing.recent import Recent
from varlen_graphs.spec.call import Call
from varlen_graphs.stats import Stats

NOT_CAPTURED = "not captured yet"
CAPTURING = "a graph was being captured"

LITTLE_MORE = 1.5
"""Where it is not known what a call takes without a graph, other budgets stand in up to so many times the cost."""


class _Want(NamedTuple):
    """What calls with some static arguments want.

    Attributes:
        basis: What to capture for.
        calls: How many calls of late wanted each budget.
    """

    basis: Basis
    calls: Recent


class Wanted:
    """Plans calls of an encoder that captures no graph in a call, and captures between calls what they wanted.

    A call that wants a budget without a graph takes other ones where that is no slower than eager. It does not wait
    for a capture, also of another encoder of the pool.

    Args:
        captured: What there is, and captures.
        planner: Plans.
        pool: Whose turn a capture takes. Tells whether there is one.
        stats: Tells how many calls there were.

    Attributes:
        some: Set when calls want something.
    """

    def __init__(self, captured: Captured, planner: Planner, pool: Pool, stats: Stats) -> None:
        self.some = Event()
        self._captured = captured
        self._planner = planner
        self._pool = pool
        self._stats = stats
        self._wants: dict[Key, _Want] = {}
        self._lock = Lock()

    @property
    def reason(self) -> str:
        """Why a call runs without a graph."""
        return CAPTURING if self._pool.busy else NOT_CAPTURED

    def packs(self, call: Call, layout: Layout, packs: Sequence[Pack], backend: Backend) -> Sequence[Pack]:
        """The replays of a call with what there is; none where eager is the better way.

        Args:
            call: The call.
            layout: Its items.
            packs: Its replays with all budgets in use.
            backend: What captures.
        """
        graphs = self._graphs(call, [one.budget for one in packs if one.budget is not None], backend)
        if graphs is None or self._pool.busy:
            return []
        costs = graphs.usable(self._planner.costs)
        if all(one.budget is None or one.budget in costs.replays for one in packs):
            return packs
        others = self._planner.packs(layout, costs)
        if any(one.budget is None for one in others):
            return []
        if costs.measured and self._captured.is_timed(call.statics):
            return [] if self._planner.eager_is_faster(others, layout) else others
        every = self._planner.costs
        if any(one.budget not in every.replays for one in packs):  # one went out of use just now
            return others
        return others if total_cost(others, costs) <= LITTLE_MORE * total_cost(packs, every) else []

    def unseen(self, call: Call, budget: Budget, backend: Backend) -> Budget | None:
        """The same for items that only the GPU has seen, and one budget."""
        graphs = self._graphs(call, [budget], backend)
        if graphs is None or self._pool.busy:
            return None
        return budget if budget in graphs else self._close(self._planner.unseen(call, self._usable(graphs)), budget)

    def whole(self, call: Call, layout: Layout, budget: Budget, backend: Backend) -> Budget | None:
        """The same for a stage."""
        graphs = self._graphs(call, [budget], backend)
        if graphs is None or self._pool.busy:
            return None
        return budget if budget in graphs else self._close(self._planner.whole(layout, self._usable(graphs)), budget)

    def want(self, basis: Basis, calls: Mapping[Budget, float]) -> None:
        """Count that calls wanted budgets just now."""
        with self._lock:
            want = self._wants.setdefault(self._captured.key(basis.statics), _Want(basis, Recent()))
            want.calls.count(calls, self._stats.calls)
        self.some.set()

    def _usable(self, graphs: Graphs) -> Costs:
        return graphs.usable(self._planner.costs)

    def _close(self, other: Budget | None, budget: Budget) -> Budget | None:
        """Another budget, if it costs little more."""
        costs = self._planner.costs.replays
        if other is None or other not in costs or budget not in costs:  # one may go out of use just now
            return None
        return other if costs[other] <= LITTLE_MORE * costs[budget] else None

    def _graphs(self, call: Call, budgets: Sequence[Budget], backend: Backend) -> Graphs | None:
        """The graphs that there are for a call; counts the budgets that have none."""
        graphs = self._captured.find(call.statics)
        missing = [budget for budget in budgets if graphs is None or budget not in graphs]
        if missing:
            self.want(self._captured.basis(call, backend), dict.fromkeys(missing, 1))
        return graphs

    def capture(self, most: int | None) -> list[Budget]:
        """Capture at most so many of the budgets that calls wanted, the most wanted first; says which.

        Takes the pool's turn for each of them alone. Nothing is captured that is wanted in another state of the module,
        or with other adapters, than it has now.

        Raises:
            InputError: This thread is inside a stage.
            CaptureError, StaleGraphError, and what the module raises: As for a call that captures.
        """
        done: list[Budget] = []
        while most is None or len(done) < most:
            with self._pool.exclusive():
                one = self._next()
                if one is None:
                    break
                key, basis, budget, calls = one
                before = self._captured.find(basis.statics)
                if before is None or budget not in before:
                    self._captured.capture(basis, [budget], calls)
                    done.append(budget)
                self._forget(key, budget)
        return done

    def _next(self) -> tuple[Key, Basis, Budget, float] | None:
        """What is wanted most, of what can be captured now."""
        self.some.clear()  # first, so that what comes from here on is not missed
        with self._lock:
            for want in self._wants.values():
                want.calls.count({}, self._stats.calls)
            wants = [
                (calls, key, want.basis, budget)
                for key, want in self._wants.items()
                for budget, calls in want.calls.items()
                if budget in self._planner.costs.replays
            ]
        for calls, key, basis, budget in sorted(wants, key=lambda one: one[0], reverse=True):
            if self._captured.is_now(key, basis) and self._captured.admits(budget, calls):
                return key, basis, budget, calls
        return None

    def _forget(self, key: Key, budget: Budget) -> None:
        """Take a budget off the list, which has a graph now, or cannot have one."""
        with self._lock:
            want = self._wants[key]
            del want.calls[budget]
            if not want.calls:
                del self._wants[key]
