"""Evict the budgets that save the least time for the memory they take."""

import math
from collections import Counter
from collections.abc import Mapping

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.eviction.recent import Recent, share_of_each

EAGER_COST = 2.0
"""Assumed cost of an eager call, in replays, before it is measured."""


class LeastUseful:
    """An `EvictionPolicy`: a budget's use is its recent calls times what each saves against the next best way."""

    def __init__(self) -> None:
        self._recent = Recent()
        self._seen: Counter[Budget] = Counter()

    def record(
        self, replays: Mapping[Budget, int], calls: int, requested: Mapping[Budget, float] | None = None
    ) -> None:
        """Take in replays and requests since the last record."""
        now, each = Counter(dict(replays)), share_of_each(calls - self._recent.now)
        self._recent.count({budget: (count - self._seen[budget]) * each for budget, count in now.items()}, calls)
        self._recent.count(requested or {}, calls)
        self._seen = now

    def worth(self, budget: Budget, own: Mapping[Budget, int], costs: Costs, requested: float = 0.0) -> float:
        """Return recent calls of a budget times what each saves."""
        return (self._recent.get(budget, 0.0) + requested) * _saved(budget, costs, own)

    def evict(self, own: Mapping[Budget, int], per_row: float, limit: float, costs: Costs) -> list[Budget]:
        """Evict the least useful for its memory first; then keep what fits after all, the most used first."""
        left, evicted = dict(own), list[Budget]()

        def fits(*more: Budget) -> bool:
            taken = math.fsum(own[budget] for budget in (*left, *more))
            return per_row * max((*left, *more)).rows + taken <= limit

        while left and (not evicted or not fits()):
            rows = sorted((budget.rows for budget in left), reverse=True)
            shared = {max(left): per_row * (rows[0] - rows[1] if len(rows) > 1 else rows[0])}
            freed = {budget: taken + shared.get(budget, 0.0) for budget, taken in left.items()}
            one = min(
                left, key=lambda budget: (self.worth(budget, left, costs) / max(1.0, freed[budget]), -freed[budget])
            )
            evicted.append(one)
            del left[one]
        while len(evicted) > 1 and (fitting := [budget for budget in evicted if fits(budget)]):
            one = max(fitting, key=lambda budget: (self.worth(budget, left, costs), budget))
            evicted.remove(one)
            left[one] = own[one]
        return evicted


def _saved(budget: Budget, costs: Costs, others: Mapping[Budget, float]) -> float:
    """Return what a replay saves against one of another budget that holds as much, or against eager."""
    own = costs.replays[budget]
    eager = costs.eager(budget.rows, 0) if costs.measured else EAGER_COST * own
    room = budget.rows, budget.items, budget.segments, budget.max_seqlen
    ways = [costs.replays[other] for other in others if other != budget and other.holds(*room)]
    return max(0.0, min([eager, *ways]) - own)
