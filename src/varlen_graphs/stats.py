"""Counters of an encoder."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import InputError
from varlen_graphs.prometheus import Metric, exposition


class Reason(str):
    """A reason why calls run eager, one of few texts, and beside it what was special about this call.

    Attributes:
        detail: The numbers of this call; empty if there are none.
    """

    __slots__ = ("detail",)
    detail: str

    def __new__(cls, reason: str, detail: str = "") -> "Reason":
        """Make a reason of its text and its detail."""
        made = super().__new__(cls, reason)
        made.detail = detail
        return made


@dataclass
class Stats:
    """Counters of an encoder. Any thread may read or update them, and so may signal handlers and finalisers.

    A copy, also a pickled one, has the numbers of one moment.

    Attributes:
        calls: Number of calls.
        items: Items of all calls.
        replays: Number of replays of each budget.
        active: Active rows in all replays of each budget.
        eager: Number of eager runs, by reason.
        details: What the last of them lacked, such as "20 segments, and no budget has more than 16", by reason.
        rows: Active rows in all replays.
        padding: Padding rows in all replays.
        checked: Number of replays of each budget that `verify=` compared with an eager run.
        wrong: Number of those whose output was wrong.
        against: Number of those by what ran eager, in words: the module itself, or the declared forward for calls that
            the module does not take.
        exact: Number of replays of graphs of exactly the size of a call, see `Capture(exact=...)`, by the budget that
            the call would have used.
        evicted: Number of times that the graphs of each budget were evicted for `memory=`.
        wrong_layouts: Number of calls whose layout the GPU found wrong, as far as the last call or `check()` knew.
        capture_failures: Number of errors that ended the thread of `capture_in_background`.
        capture_failure: The last of these errors, in a line; `None` if there was none.
    """

    calls: int = 0
    items: int = 0
    replays: Counter[Budget] = field(default_factory=Counter)
    active: Counter[Budget] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    padding: int = 0
    checked: Counter[Budget] = field(default_factory=Counter)
    wrong: Counter[Budget] = field(default_factory=Counter)
    against: Counter[str] = field(default_factory=Counter)
    exact: Counter[Budget] = field(default_factory=Counter)
    evicted: Counter[Budget] = field(default_factory=Counter)
    wrong_layouts: int = 0
    capture_failures: int = 0
    capture_failure: str | None = None
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)  # a handler may interrupt who holds it

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: copy(value) for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    def count_call(self, items: int) -> None:
        """Count a call."""
        with self._lock:
            self.calls += 1
            self.items += items

    def count_eager(self, reason: str) -> None:
        """Count an eager run, and keep the detail of a `Reason`."""
        reason, detail = str(reason), getattr(reason, "detail", "")
        with self._lock:
            self.eager[reason] += 1
            if detail:
                self.details[reason] = detail

    def add_eager(self, other: "Stats") -> None:
        """Add calls that were counted before there was an encoder, all of which ran eager."""
        with self._lock, other._lock:
            self.calls += other.calls
            self.items += other.items
            self.eager += other.eager

    def count_replay(self, budget: Budget, active: int) -> None:
        """Count a replay with this number of active rows."""
        with self._lock:
            self.replays[budget] += 1
            self.active[budget] += active
            self.rows += active
            self.padding += budget.rows - active

    def count_exact(self, fallback: Budget, active: int) -> None:
        """Count a replay of a graph of exactly the size of a call, which would have used this budget without it."""
        with self._lock:
            self.exact[fallback] += 1
            self.rows += active

    def count_check(self, budget: Budget, right: bool, against: str) -> None:
        """Count a replay that was compared with an eager run, against which one."""
        with self._lock:
            self.checked[budget] += 1
            self.against[against] += 1
            if not right:
                self.wrong[budget] += 1

    def count_wrong_layouts(self, count: int) -> None:
        """Count calls whose layout the GPU found wrong."""
        with self._lock:
            self.wrong_layouts += count

    def count_capture_failure(self, error: str) -> None:
        """Count an error that ended the captures in the background."""
        with self._lock:
            self.capture_failures += 1
            self.capture_failure = error

    def count_evicted(self, budgets: Iterable[Budget]) -> None:
        """Count budgets whose graphs were evicted."""
        with self._lock:
            self.evicted.update(budgets)

    @property
    def uses(self) -> Counter[Budget]:
        """Number of calls of each budget, those that had a graph of exactly their size included."""
        with self._lock:
            return self.replays + self.exact

    @property
    def padding_share(self) -> float:
        """Share of padding in all replayed rows, 0 to 1."""
        return self.padding / max(1, self.rows + self.padding)

    def as_dict(self) -> dict[str, Any]:
        """Return a consistent snapshot that JSON can hold: totals, eager runs by reason, and the used budgets."""
        with self._lock:
            return {
                "calls": self.calls,
                "items": self.items,
                "rows": self.rows,
                "padding": self.padding,
                "wrong_layouts": self.wrong_layouts,
                "capture_failures": self.capture_failures,
                "capture_failure": self.capture_failure,
                "eager": dict(self.eager),
                "against": dict(self.against),
                "details": dict(self.details),
                "budgets": [
                    {
                        **budget._asdict(),
                        "replays": self.replays[budget],
                        "active": self.active[budget],
                        "padding": budget.rows * self.replays[budget] - self.active[budget],
                        "checked": self.checked[budget],
                        "wrong": self.wrong[budget],
                        "evicted": self.evicted[budget],
                        "exact": self.exact[budget],
                    }
                    for budget in sorted({*self.replays, *self.checked, *self.evicted, *self.exact})
                ],
            }

    def metrics(self) -> list[Metric]:
        """Return a consistent snapshot as metrics for `prometheus`."""
        now = self.as_dict()
        metrics = [Metric(f"{name}_total", text, (), [((), now[name])]) for name, text in _OF_ALL.items()]
        reasons = [((reason,), count) for reason, count in now["eager"].items()]
        metrics += [Metric("eager_total", "Eager runs.", ("reason",), reasons)]
        against = [((reference,), count) for reference, count in now["against"].items()]
        metrics += [Metric("checked_total", "Replays compared with an eager run, by which.", ("against",), against)]
        budgets = [([each[label] for label in _LABELS], each) for each in now["budgets"]]
        metrics += [
            Metric(f"budget_{name}_total", text, _LABELS, [(own, each[name]) for own, each in budgets])
            for name, text in _OF_BUDGETS.items()
        ]
        return metrics

    def prometheus(self, prefix: str = "varlen_graphs", **labels: object) -> str:
        """Return a consistent snapshot in the text format that Prometheus scrapes.

            encoder.stats.prometheus(model="vision")

        A page must not repeat a name: `vg.stats.prometheus` makes one page of several encoders.

        Args:
            prefix: Prefix of all metric names.
            **labels: Labels of every sample.

        Raises:
            InputError: The prefix or a label is not a valid name, or the counters have the label themselves.
        """
        return exposition([(self.metrics(), labels)], prefix)


class Measured(Protocol):
    """An encoder, or its counters alone."""

    def metrics(self) -> list[Metric]:
        """Return metrics."""


def prometheus(encoders: Mapping[str, Measured], /, prefix: str = "varlen_graphs", **labels: object) -> str:
    """Return the metrics of several encoders in the text format that Prometheus scrapes.

        page = vg.stats.prometheus({"vision": vision, "text": text}, model="a name")

    Each sample has the label `encoder`, the name of its encoder here. Encoders have gauges beside the counters of
    `Stats`: of their graphs, memory and captures.

    Args:
        encoders: Encoders, or their `stats`, by names.
        prefix: Prefix of all metric names.
        **labels: More labels of every sample.

    Raises:
        InputError: The prefix or a label is not a valid name, or the metrics have the label themselves.
    """
    if "encoder" in labels:
        raise InputError("label 'encoder' is the name of an encoder: use another name")
    return exposition([(one.metrics(), {"encoder": name, **labels}) for name, one in encoders.items()], prefix)


_LABELS = ("rows", "items", "segments", "max_seqlen")

_OF_ALL = {
    "calls": "Calls.",
    "items": "Items of all calls.",
    "rows": "Active rows in all replays.",
    "padding": "Padding rows in all replays.",
    "wrong_layouts": "Calls whose layout the GPU found wrong.",
    "capture_failures": "Errors that ended the captures in the background.",
}

_OF_BUDGETS = {
    "replays": "Replays of each budget.",
    "active": "Active rows in all replays of each budget.",
    "padding": "Padding rows in all replays of each budget.",
    "checked": "Replays of each budget that were compared with an eager run.",
    "wrong": "Compared replays of each budget whose output was wrong.",
    "evicted": "Evictions of the graphs of each budget for the memory limit.",
    "exact": "Replays of graphs of exactly the size of a call, by the budget that it would have used.",
}
