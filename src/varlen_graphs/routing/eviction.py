"""Which budgets to give up where memory is limited."""

import math
from collections import Counter
from collections.abc import Mapping

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.recent import Recent, share_of_each

EAGER_COST = 2.0
"""What a call without a graph is taken to cost, in replays, before it is measured."""


class Use:
    """How useful budgets are: their recent calls, times what each of these saves against the next best way."""

    def __init__(self) -> None:
        self._recent = Recent()
        self._seen: Counter[Budget] = Counter()

    def look(self, replays: Mapping[Budget, int], calls: int, wanted: Mapping[Budget, float] | None = None) -> None:
        """Take in what calls did.

        Args:
            replays: How often budgets were replayed so far: since the last look now and then, as far as is known.
            calls: How many calls there were so far.
            wanted: How many recent calls wanted budgets that have no graph.
        """
        now, each = Counter(dict(replays)), share_of_each(calls - self._recent.now)
        self._recent.count({budget: (count - self._seen[budget]) * each for budget, count in now.items()}, calls)
        self._recent.count(wanted or {}, calls)
        self._seen = now

    def of(self, budget: Budget, costs: Costs, others: Mapping[Budget, float], wanted: float = 0.0) -> float:
        """How useful a budget is beside others.

        Args:
            budget: One that is in use.
            costs: What replays cost.
            others: Those that have graphs; it may be among them.
            wanted: How many recent calls wanted it beside those that were taken in.
        """
        return (self._recent.get(budget, 0.0) + wanted) * _saved(budget, costs, others)


def _saved(budget: Budget, costs: Costs, others: Mapping[Budget, float]) -> float:
    """What a replay saves against one of another budget that holds as much, or against eager."""
    own = costs.replays[budget]
    eager = costs.eager(budget.rows, 0) if costs.measured else EAGER_COST * own
    room = budget.rows, budget.items, budget.segments, budget.max_seqlen
    ways = [costs.replays[other] for other in others if other != budget and other.holds(*room)]
    return max(0.0, min([eager, *ways]) - own)


def least_useful(own: Mapping[Budget, float], per_row: float, limit: float, use: Use, costs: Costs) -> list[Budget]:
    """The budgets to give up so that the rest fits, one at least: first what is of the least use for its memory.

    What fits beside the rest after all, stays: the most used first.

    Args:
        own: What the graphs of each budget take beside shared memory, bytes.
        per_row: What shared memory takes for each row of the largest budget: bytes that go only with that one.
        limit: What may be taken, bytes.
        use: How useful each is.
        costs: What replays cost.
    """
    left, gone = dict(own), list[Budget]()

    def fits(*more: Budget) -> bool:
        taken = math.fsum(own[budget] for budget in (*left, *more))
        return per_row * max((*left, *more)).rows + taken <= limit

    while left and (not gone or not fits()):
        rows = sorted((budget.rows for budget in left), reverse=True)
        shared = {max(left): per_row * (rows[0] - rows[1] if len(rows) > 1 else rows[0])}
        freed = {budget: taken + shared.get(budget, 0.0) for budget, taken in left.items()}
        one = min(left, key=lambda budget: (use.of(budget, costs, left) / max(1.0, freed[budget]), -freed[budget]))
        gone.append(one)
        del left[one]
    while len(gone) > 1 and (fitting := [budget for budget in gone if fits(budget)]):
        one = max(fitting, key=lambda budget: (use.of(budget, costs, left), budget))
        gone.remove(one)
        left[one] = own[one]
    return gone
