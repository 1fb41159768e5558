"""Costs of replays: in rows until they are measured, in milliseconds then."""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import InputError
from varlen_graphs.files import number

REPLAY_ROWS = 512
"""Fixed cost of a replay, in rows: two small replays do not beat one that is a little larger."""

MARGIN = 0.1
"""Relative difference at which measured times count as different: replays vary by a few per cent from call to call, and
several replays of one call take longer than each did while it was timed."""

SEARCH_MS = 0.003
"""Milliseconds of the host to search the best split of a call, for the square of its items."""

SEARCH_ITEMS = 64
"""Number of items above which the search does not grow with the square."""


class Costs:
    """Costs of a replay of each budget, and of an eager call.

    Attention costs the same in every budget, because it follows the actual segments: `per_square` for each squared row
    of a segment. So it never decides how a call is split, only whether it runs eager.

    Args:
        replays: Cost of one replay of each budget, without attention.
        per_square: Cost of attention for each squared row of a segment.
        host: Least cost of an eager call: the time of the host. Infinite until something is measured.
        eager_factor: Cost of the work of an eager call, relative to a graph of exactly its size.
        bytes_per_row: Bytes of pool and arena for each row of the largest budget; `None` until it is measured.

    Attributes:
        replays, per_square, host, bytes_per_row: As given.
        measured: True if costs are measured milliseconds.
        budgets: The budgets worth using, ascending: no larger one replaces them at no higher cost.
        dropped: The other budgets.
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
        self.budgets = _worth_using(replays)
        self.dropped = sorted(replays.keys() - set(self.budgets))
        by_cost = sorted(self.budgets, key=replays.__getitem__)
        self._rows = [budget.rows for budget in self.budgets]
        self._at_least = [[budget for budget in by_cost if budget.rows >= rows] for rows in self._rows]
        self._lines = self._lines_below(by_cost[0]) if by_cost else []
        self._unsplit = {budget: self._unsplit_from(budget) for budget in self.budgets}
        # Of budgets with equal rows the costlier one: it holds more items or segments, which a call may need.
        self._steps = sorted({budget.rows: replays[budget] for budget in by_cost}.items())

    @classmethod
    def in_rows(cls, budgets: Sequence[Budget]) -> "Costs":
        """Return assumed costs, until something is measured: no budget is dropped, and eager never wins."""
        return cls({budget: budget.rows + REPLAY_ROWS for budget in budgets})

    def without(self, out: Collection[Budget]) -> "Costs":
        """Return these costs without some budgets; there may be none left."""
        if not out:
            return self
        replays = {budget: cost for budget, cost in self.replays.items() if budget not in out}
        same = len(replays) == len(self.replays)
        return self if same else Costs(replays, self.per_square, self.host, self._eager_factor, self.bytes_per_row)

    def over(self, budgets: Collection[Budget]) -> "Costs":
        """Return these costs for other budgets, interpolated where no replay was timed.

        Beyond the timed ones, costs are proportional to those in rows.
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
        """Return these costs with more timed budgets."""
        return Costs({**self.replays, **replays}, self.per_square, self.host, self._eager_factor, bytes_per_row)

    def as_json(self) -> dict[str, Any]:
        """Return the measured costs for JSON."""
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
        """Return the costs that `as_json` wrote.

        Raises:
            One of `files.DAMAGED`: The value is something else.
        """
        replays = {Budget(*sizes): number("the cost of a replay", cost) for *sizes, cost in value["replays"]}
        if not replays:
            raise InputError("replays is empty: expected the measured cost of one budget or more")
        return cls(
            replays,
            number("per_square", value["per_square"], zero=True),
            number("host", value["host"]),
            number("eager_factor", value["eager_factor"]),
            None if value["bytes_per_row"] is None else number("bytes_per_row", value["bytes_per_row"]),
        )

    def at_least(self, rows: int) -> Sequence[Budget]:
        """Return the budgets of at least so many rows, the cheapest first."""
        at = bisect_left(self._rows, rows)
        return self._at_least[at] if at < len(self._at_least) else []

    def lower_bound(self, rows: int, replays: int = 1) -> float:
        """Return a lower bound of the cost of so many replays, or more, with so many rows together."""
        return max([replays * fixed + per_row * rows for fixed, per_row in self._lines])

    def least_saved(self, items: int, whole: Budget) -> float:
        """Return what a split of so many items must save against one replay of `whole` to be worth it.

        The host's search, and the variation of measured times; nothing while costs are in rows.
        """
        return SEARCH_MS * min(items, SEARCH_ITEMS) ** 2 + MARGIN * self.replays[whole] if self.measured else 0.0

    def may_split(self, rows: int, items: int, whole: Budget) -> bool:
        """Return True if a split of so many items could be worth it, against one replay of `whole`."""
        if rows >= self._unsplit[whole]:
            return False
        return self.replays[whole] - self.lower_bound(rows, 2) > self.least_saved(items, whole)

    def _unsplit_from(self, whole: Budget) -> float:
        """Return the number of rows from which no split can be worth it, against one replay of `whole`."""
        most = self.replays[whole] - self.least_saved(2, whole)
        return min(
            0.0 if 2 * fixed >= most else (most - 2 * fixed) / per_row if per_row else math.inf
            for fixed, per_row in self._lines
        )

    def _lines_below(self, cheapest: Budget) -> list[tuple[float, float]]:
        """Return lines `fixed + per_row * rows` below the costs of all budgets, each the highest somewhere.

        `fixed` is never below 0: then a bound for two replays holds for more.
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
        """Return the cost of a graph of exactly so many rows, without attention: between the budgets around it.

        Below the smallest budget proportional to the rows: too little, but there the host bounds the cost of a call.
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
        """Return the cost of a replay of a budget of so many rows, without attention, if there were one.

        Below the smallest budget equal to it: with few rows, launching kernels takes the time. Above the largest one
        with the slope between half of its rows and all of them, if that rises.
        """
        if not self.measured:
            return rows + REPLAY_ROWS
        smallest, largest = self.budgets[0].rows, self.budgets[-1].rows
        if rows <= largest:
            return self.exact(max(rows, smallest))
        half = largest // 2
        rise = max(0.0, (self.exact(largest) - self.exact(half)) / (largest - half))
        return self.exact(largest) + rise * (rows - largest)

    def eager(self, rows: int, squares: int) -> float:
        """Return the cost of an eager call of so many rows."""
        return max(self.host, self.eager_work(rows, squares))

    def eager_work(self, rows: int, squares: int) -> float:
        """Return the cost of an eager call without the least that the host takes."""
        return self._eager_factor * (self.exact(rows) + self.per_square * squares)


def _worth_using(replays: Mapping[Budget, float]) -> list[Budget]:
    """Return the budgets, ascending, that no larger one replaces: holding all that they do, at no higher cost."""
    kept: list[Budget] = []
    for budget in sorted(replays, reverse=True):
        if not any(replays[larger] <= replays[budget] and larger.holds(*budget) for larger in kept):
            kept.append(budget)
    return kept[::-1]
