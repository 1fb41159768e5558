"""What an encoder did so far."""

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

from varlen_graphs.budgets import Budget


@dataclass
class Stats:
    """Counters of an encoder.

    Attributes:
        calls: Calls.
        items: Items of all calls.
        replays: Replays of each budget.
        active: Active rows in all replays of each budget.
        eager: Runs without a graph, by reason.
        rows: Active rows that were replayed.
        padding: Rows of padding that were replayed with them.
        checked: Replays of each budget that were compared with the module itself, with `verify=`.
        wrong: Those that gave something else.
    """

    calls: int = 0
    items: int = 0
    replays: Counter[Budget] = field(default_factory=Counter)
    active: Counter[Budget] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    padding: int = 0
    checked: Counter[Budget] = field(default_factory=Counter)
    wrong: Counter[Budget] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count_call(self, items: int) -> None:
        """Count a call."""
        with self._lock:
            self.calls += 1
            self.items += items

    def count_eager(self, reason: str) -> None:
        """Count a run without a graph."""
        with self._lock:
            self.eager[reason] += 1

    def count_replay(self, budget: Budget, active: int) -> None:
        """Count a replay of so many active rows."""
        with self._lock:
            self.replays[budget] += 1
            self.active[budget] += active
            self.rows += active
            self.padding += budget.rows - active

    def count_check(self, budget: Budget, right: bool) -> None:
        """Count a replay that was compared with the module itself."""
        with self._lock:
            self.checked[budget] += 1
            if not right:
                self.wrong[budget] += 1

    @property
    def padding_share(self) -> float:
        """Padding among all replayed rows, 0 to 1."""
        return self.padding / max(1, self.rows + self.padding)
