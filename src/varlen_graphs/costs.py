"""What replays cost, so that calls are packed at the least cost: in rows until it is measured, in milliseconds then."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter

from varlen_graphs.budgets import Budget

REPLAY_ROWS = 512
"""What a replay costs beside its rows, in rows: two small replays do not beat one that is a little larger."""


class Costs:
    """The cost of a replay of each budget, and of a call without a graph.

    Attention costs the same in every budget, because it follows the segments that are there: `per_square` for each
    squared row of a segment. So it never decides how a call is split, only whether it runs without a graph.

    Args:
        replays: The cost of one replay of each budget, attention aside.
        per_square: The cost of attention, for the sum of the squared lengths of segments.
        eager: What a call without a graph costs at least: the time the host needs.
        eager_factor: What the work of such a call costs in proportion to that of a graph of exactly its size.

    Attributes:
        budgets: The budgets worth using, ascending: those that no other one replaces at no higher cost.
        dropped: The others.
    """

    def __init__(
        self,
        replays: Mapping[Budget, float],
        per_square: float = 0.0,
        eager: float = math.inf,
        eager_factor: float = 1.0,
    ) -> None:
        self.replays = replays
        self.per_square = per_square
        self.host = eager
        self.eager_factor = eager_factor
        self.dropped = [budget for budget in sorted(replays) if any(self._replaces(b, budget) for b in replays)]
        self.budgets = [budget for budget in sorted(replays) if budget not in self.dropped]
        smallest, *larger = self.budgets
        rises = [
            (replays[budget] - replays[smallest]) / (budget.rows - smallest.rows)
            for budget in larger
            if budget.rows > smallest.rows
        ]
        # A line under all costs: no replay of so many rows costs less.
        self._per_row = max(0.0, min(rises, default=0.0))
        self._fixed = min(replays[budget] - self._per_row * budget.rows for budget in self.budgets)

    @classmethod
    def in_rows(cls, budgets: Sequence[Budget]) -> "Costs":
        """What is assumed until something is measured: no budget is dropped for it, and eager never wins."""
        return cls({budget: budget.rows + REPLAY_ROWS for budget in budgets})

    def _replaces(self, other: Budget, budget: Budget) -> bool:
        """Whether a larger budget holds all that this one does, and costs no more."""
        holds = other.holds(budget.rows, budget.items, budget.segments, budget.max_seqlen)
        return other > budget and holds and self.replays[other] <= self.replays[budget]

    def of_two(self, rows: int) -> float:
        """What two replays of together so many rows cost at least."""
        return 2 * self._fixed + self._per_row * rows

    def exact(self, rows: int) -> float:
        """What a graph of exactly so many rows would cost, attention aside: between the budgets around it."""
        above = bisect_left(self.budgets, rows, key=attrgetter("rows"))
        if above == 0:
            return self.replays[self.budgets[0]]
        lower, upper = self.budgets[above - 1], self.budgets[min(above, len(self.budgets) - 1)]
        if upper.rows == lower.rows:
            return self.replays[lower] * rows / lower.rows
        share = (rows - lower.rows) / (upper.rows - lower.rows)
        return self.replays[lower] + share * (self.replays[upper] - self.replays[lower])

    def eager(self, rows: int, squares: int) -> float:
        """What a call of so many rows costs without a graph."""
        return max(self.host, self.eager_factor * (self.exact(rows) + self.per_square * squares))
