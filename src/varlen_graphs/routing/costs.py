"""What replays cost, so that calls are packed at the least cost: in rows until it is measured, in milliseconds then."""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from varlen_graphs.errors import InputError
from varlen_graphs.files import number
from varlen_graphs.layout.budgets import Budget

REPLAY_ROWS = 512
"""What a replay costs beside its rows, in rows: two small replays do not beat one that is a little larger."""

MARGIN = 0.1
"""The share by which measured times must differ to be told apart: a replay takes a few per cent more or less from call
to call, and several replays of one call take more than each by itself did while it was timed."""

SEARCH_MS = 0.003
"""Milliseconds of the host to look for the best split of a call, for the square of its items."""

SEARCH_ITEMS = 64
"""Above so many the search does not grow with the square."""


class Costs:
    """The cost of a replay of each budget, and of a call without a graph.

    Attention costs the same in every budget, because it follows the segments that are there: `per_square` for each
    squared row of a segment. So it never decides how a call is split, only whether it runs without a graph.

    Args:
        replays: The cost of one replay of each budget, attention aside.
        per_square: The cost of attention, for the sum of the squared lengths of segments.
        host: What a call without a graph costs at least: the time the host needs. Infinite until something is measured.
        eager_factor: What the work of such a call costs in proportion to that of a graph of exactly its size.
        bytes_per_row: What pool and arena take, for each row of the largest budget; `None` until it is measured.

    Attributes:
        replays: As given.
        per_square: As given.
        host: As given.
        bytes_per_row: As given.
        measured: Whether costs are milliseconds that were measured.
        budgets: The budgets worth using, ascending: those that no other one replaces at no higher cost.
        dropped: The others.
    """

    def __init__(
        self,
        replays: Mapping[Budget, float],
        per_square: float = 0.0,
        host: float = math.inf,
        eager_factor: float = 1.0,
        bytes_per_row: float | None = None,
    ) -> None:
        self.replays = replays
        self.per_square = per_square
        self.host = host
        self.bytes_per_row = bytes_per_row
        self.measured = host < math.inf
        self._eager_factor = eager_factor
        self.dropped = [budget for budget in sorted(replays) if any(self._replaces(b, budget) for b in replays)]
        self.budgets = [budget for budget in sorted(replays) if budget not in self.dropped]
        by_cost = sorted(self.budgets, key=replays.__getitem__)
        self._rows = [budget.rows for budget in self.budgets]
        self._at_least = [[budget for budget in by_cost if budget.rows >= rows] for rows in self._rows]
        self._lines = self._lines_below(by_cost[0]) if by_cost else []
        self._unsplit = {budget: self._unsplit_from(budget) for budget in self.budgets}
        # Of budgets with as many rows the costlier one: it holds more items or segments, and a call may need them.
        self._steps = sorted({budget.rows: replays[budget] for budget in by_cost}.items())

    @classmethod
    def in_rows(cls, budgets: Sequence[Budget]) -> "Costs":
        """What is assumed until something is measured: no budget is dropped for it, and eager never wins."""
        return cls({budget: budget.rows + REPLAY_ROWS for budget in budgets})

    def without(self, out: Collection[Budget]) -> "Costs":
        """The same without some budgets; there may be none left."""
        replays = {budget: cost for budget, cost in self.replays.items() if budget not in out}
        same = len(replays) == len(self.replays)
        return self if same else Costs(replays, self.per_square, self.host, self._eager_factor, self.bytes_per_row)

    def over(self, budgets: Collection[Budget]) -> "Costs":
        """The same for other budgets. What no replay of was timed is taken to cost what lies between those that were.

        Beyond these, costs are in proportion to those in rows.
        """
        if self.replays.keys() == {*budgets}:
            return self
        if not self.measured:
            return Costs.in_rows([*budgets])
        timed = sorted((budget.rows, cost) for budget, cost in self.replays.items())

        def expected(rows: int) -> float:
            below = max([one for one in timed if one[0] <= rows], default=None)
            above = min([one for one in timed if one[0] >= rows], default=None)
            if below is None or above is None:
                near, cost = below or above or timed[0]
                return cost * (rows + REPLAY_ROWS) / (near + REPLAY_ROWS)
            if below[0] == above[0]:
                return below[1]
            return below[1] + (rows - below[0]) / (above[0] - below[0]) * (above[1] - below[1])

        replays = {b: self.replays[b] if b in self.replays else expected(b.rows) for b in budgets}
        return Costs(replays, self.per_square, self.host, self._eager_factor, self.bytes_per_row)

    def with_more(self, replays: Mapping[Budget, float], bytes_per_row: float | None) -> "Costs":
        """The same with more budgets that were timed."""
        return Costs({**self.replays, **replays}, self.per_square, self.host, self._eager_factor, bytes_per_row)

    def as_json(self) -> dict[str, Any]:
        """What was measured, as JSON takes it."""
        replays = [[b.rows, b.items, b.segments, b.max_seqlen, cost] for b, cost in sorted(self.replays.items())]
        return {
            "replays": replays,
            "per_square": self.per_square,
            "host": self.host,
            "eager_factor": self._eager_factor,
            "bytes_per_row": self.bytes_per_row,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Costs":
        """From what `as_json` gave.

        Raises:
            ValueError, TypeError, KeyError: It is something else.
        """
        replays = {Budget(*sizes): number("the cost of a replay", cost) for *sizes, cost in value["replays"]}
        if not replays:
            raise InputError("replays is empty: expected what was measured of one budget or more")
        return cls(
            replays,
            number("per_square", value["per_square"], zero=True),
            number("host", value["host"]),
            number("eager_factor", value["eager_factor"]),
            None if value["bytes_per_row"] is None else number("bytes_per_row", value["bytes_per_row"]),
        )

    def _replaces(self, other: Budget, budget: Budget) -> bool:
        """Whether a larger budget holds all that this one does, and costs no more."""
        holds = other.holds(budget.rows, budget.items, budget.segments, budget.max_seqlen)
        return other > budget and holds and self.replays[other] <= self.replays[budget]

    def at_least(self, rows: int) -> Sequence[Budget]:
        """The budgets of at least so many rows, the cheapest first."""
        at = bisect_left(self._rows, rows)
        return self._at_least[at] if at < len(self._at_least) else []

    def of_several(self, rows: int) -> float:
        """What two replays or more of together so many rows cost at least."""
        return max([2 * fixed + per_row * rows for fixed, per_row in self._lines])

    def least_saved(self, items: int, whole: Budget) -> float:
        """What a split of so many items must save, against one replay of `whole`, to be worth it.

        The host's search for it, and what measured times vary by: nothing while costs are in rows.
        """
        return SEARCH_MS * min(items, SEARCH_ITEMS) ** 2 + MARGIN * self.replays[whole] if self.measured else 0.0

    def may_split(self, rows: int, items: int, whole: Budget) -> bool:
        """Whether a split of so many items could be worth it, against one replay of `whole`."""
        if rows >= self._unsplit[whole]:
            return False
        return self.replays[whole] - self.of_several(rows) > self.least_saved(items, whole)

    def _unsplit_from(self, whole: Budget) -> float:
        """From how many rows on no split can be worth it, against one replay of `whole`."""
        most = self.replays[whole] - self.least_saved(2, whole)
        return min(
            0.0 if 2 * fixed >= most else (most - 2 * fixed) / per_row if per_row else math.inf
            for fixed, per_row in self._lines
        )

    def _lines_below(self, cheapest: Budget) -> list[tuple[float, float]]:
        """Lines `fixed + per_row * rows` under the costs of all budgets, each the highest somewhere.

        `fixed` is never below 0: a bound for two replays is one for more of them then.
        """
        costs, at = self.replays, cheapest
        lines = [(costs[cheapest], 0.0), (0.0, min(costs[budget] / budget.rows for budget in self.budgets))]
        while larger := [budget for budget in self.budgets if budget.rows > at.rows]:
            rise, after = min(((costs[b] - costs[at]) / (b.rows - at.rows), b) for b in larger)
            fixed = costs[at] - rise * at.rows
            if fixed < 0:
                break
            lines.append((fixed, rise))
            at = after
        return lines

    def exact(self, rows: int) -> float:
        """What a graph of exactly so many rows would cost, attention aside: between the budgets around it.

        Below the smallest budget in proportion to the rows: too little, but the host bounds what a call costs there.
        """
        above = bisect_left(self._steps, (rows,))
        if above == 0:
            more, upper = self._steps[0]
            return upper * rows / more
        fewer, lower = self._steps[above - 1]
        if above == len(self._steps):
            return lower * rows / fewer
        more, upper = self._steps[above]
        return lower + (rows - fewer) / (more - fewer) * (upper - lower)

    def replay(self, rows: int) -> float:
        """What a replay of a budget of so many rows would cost, attention aside, whether or not there is one.

        Below the smallest budget as much as that one: with few rows, launching the kernels is what takes the time.
        Above the largest one as much more for each row as from half of its rows to all of them.
        """
        if not self.measured:
            return rows + REPLAY_ROWS
        smallest, largest = self.budgets[0].rows, self.budgets[-1].rows
        if rows <= largest:
            return self.exact(max(rows, smallest))
        half = largest // 2
        rise = (self.exact(largest) - self.exact(half)) / (largest - half)
        return self.exact(largest) + rise * (rows - largest)

    def eager(self, rows: int, squares: int) -> float:
        """What a call of so many rows costs without a graph."""
        return max(self.host, self._eager_factor * (self.exact(rows) + self.per_square * squares))
