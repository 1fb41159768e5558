"""Graphs of exactly the size of layouts that calls bring again and again."""

from threading import Event
from typing import NamedTuple

from varlen_graphs.graphs.capturer import CaptureInputs, Key
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.routing.eviction.recent import RECENT
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.router import Route
from varlen_graphs.spec.call import Call
from varlen_graphs.stats import Stats

LEAST = 4
"""Number of calls of late from which a layout is worth a graph."""

MUCH_MORE = 2.0
"""How many times as often as another one a layout must come to take the place of its graph."""

MOST_LAYOUTS = 4096
"""Number of layouts that are counted; beyond it, those that came least are forgotten."""


class Recurrence(NamedTuple):
    """A layout, and the key of the graphs that its calls use."""

    key: Key
    layout: Layout


class RecurringLayouts:
    """Counts the layouts of calls, and keeps graphs of exactly their size for those that come most often.

    Such a graph is captured at the budget at which an eager run computes, and no other layout uses it. Counts are
    halved every `RECENT` calls. To be used under the pool's lock.

    Args:
        store: Captures the graphs.
        stats: Tells how many calls there were.
        most: Number of layouts that have a graph at a time.
        due: Set when there may be something to capture.
    """

    def __init__(self, store: GraphStore, stats: Stats, most: int, due: Event) -> None:
        self._store = store
        self._stats = stats
        self._most = most
        self._due = due
        self._halvings = 0
        self._calls: dict[Recurrence, float] = {}
        self._inputs: dict[Key, CaptureInputs] = {}
        self._budgets: dict[Recurrence, Budget] = {}
        self._left_out: set[Recurrence] = set()

    def count(self, call: Call) -> None:
        """Count a call whose items the host knows."""
        assert call.layout is not None  # noqa: S101 - the host knows it
        one = Recurrence(self._store.key(call.key), call.layout)
        self._inputs.setdefault(one.key, self._store.inputs(call))
        self._halve()
        self._calls[one] = calls = self._calls.get(one, 0.0) + 1
        if len(self._calls) > MOST_LAYOUTS:
            most_called = sorted(self._calls, key=self._calls.__getitem__, reverse=True)[: MOST_LAYOUTS // 2]
            self._calls = {kept: self._calls[kept] for kept in {*most_called, *self._budgets, one} & {*self._calls}}
        if calls >= LEAST and one not in self._budgets and not int(calls) & int(calls) - 1:  # at 4, 8, 16, ...
            self._due.set()

    def route(self, call: Call, graphs: GraphSet | None) -> Route | None:
        """Return the route of a call whose layout has a graph of its own."""
        if graphs is None or call.layout is None or not self._budgets:
            return None
        budget = self._budgets.get(Recurrence(self._store.key(call.key), call.layout))
        if budget is None or budget in self._store.budgets.disabled:
            return None
        if budget not in graphs:  # all were released
            self._due.set()
            return None
        return Route((Pack(budget, range(len(call.layout))),))

    def capture(self) -> Budget | None:
        """Capture a graph for the layout that came most often and has none; return its size, `None` if none is due.

        Raises:
            CaptureError, StaleGraphError, and errors of the module: As for a call that captures.
        """
        self._halve()
        for one in sorted(self._calls, key=self._calls.__getitem__, reverse=True):
            calls = self._calls[one]
            if calls < LEAST:
                break
            graphs, budget = self._store.capturer.sets.get(one.key), self._store.forward.spec.exact_budget(one.layout)
            if graphs is None:
                continue
            if budget in graphs:  # its own, that of another layout of this size, or one of the ladder
                if one not in self._budgets and self._has_room(calls):
                    self._budgets[one] = budget
                continue
            if not self._may_capture(one, graphs, budget):
                self._budgets.pop(one, None)
                continue
            if one not in self._budgets and not self._has_room(calls):
                break
            self._store.check_not_staged()
            self._store.check_memory()
            self._store.capturer.capture(one.key, self._inputs[one.key], [budget])
            if (limit := self._store.limit) is not None and self._store.bytes() > limit.most:
                self._store.drop_graphs([budget])
            if budget in graphs:
                self._budgets[one] = budget
            else:  # wrong, or too much memory
                self._left_out.add(one)
            return budget
        return None

    def _may_capture(self, one: Recurrence, graphs: GraphSet, budget: Budget) -> bool:
        left_out = one in self._left_out or budget in graphs.refused or budget in self._store.budgets.disabled
        if left_out or not graphs.arena.holds(budget):
            return False
        return self._store.can_capture(one.key, self._inputs[one.key])

    def _has_room(self, calls: float) -> bool:
        """Return True if a layout with so many calls may have a graph; drop that of the one with the fewest calls."""
        if len(self._budgets) < self._most:
            return True
        fewest = min(self._budgets, key=lambda one: self._calls.get(one, 0.0))
        if calls < MUCH_MORE * self._calls.get(fewest, 0.0):
            return False
        unused = {self._budgets.pop(fewest)} - {*self._budgets.values()}
        self._store.drop_graphs(unused & self._store.capturer.no_budgets)
        return True

    def _halve(self) -> None:
        halvings = self._stats.calls // RECENT
        if halvings != self._halvings:
            kept = 0.5 ** (halvings - self._halvings)
            self._calls = {one: calls * kept for one, calls in self._calls.items()}
            self._halvings = halvings
