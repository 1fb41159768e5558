"""A limit on the memory of graphs, arena and pool, kept by evicting the budgets of least use."""

import math
from collections import Counter
from collections.abc import Collection, Mapping

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.memory_size import SCRATCH, in_bytes
from varlen_graphs.errors import warn
from varlen_graphs.routing.costs import MARGIN, Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.recent import Recent, share_of_each
from varlen_graphs.stats import Stats

EAGER_COST = 2.0
"""Assumed cost of an eager call, in replays, before it is measured."""


class MemoryLimit:
    """Evicts budgets when graphs, arena and pool hold more than a limit.

    The use of a budget is its recent calls times what each saves against the next best way: a larger budget, or eager.

    Args:
        memory: The limit: bytes, or a text such as `"2GiB"`.
        budgets: The budgets; those that do not fit are disabled.
        stats: The counters of calls and replays; evictions are counted here.

    Attributes:
        most: The limit in bytes.

    Raises:
        BudgetError: `memory` is not an amount of memory.
    """

    def __init__(self, memory: int | str, budgets: EnabledBudgets, stats: Stats) -> None:
        self.most = in_bytes(memory)
        self._budgets = budgets
        self._stats = stats
        self._recent = Recent()
        self._seen: Counter[Budget] = Counter()
        self._warned = False

    def request(self, budgets: Collection[Budget], calls: float) -> None:
        """Take in that so many recent calls requested budgets without a graph."""
        self._count_replays()
        self._recent.count(dict.fromkeys(budgets, calls), self._stats.calls)

    def evict(self, own: Mapping[Budget, int], held: int, has_pool: bool, lazy: bool) -> tuple[list[Budget], bool]:
        """Disable budgets so that the rest may fit.

        Args:
            own: Bytes that the graphs of each budget take beside shared memory.
            held: Bytes that all hold together.
            has_pool: True if a part of that is a pool, which has scratch memory.
            lazy: True if evicted budgets below the largest one left may come back.

        Returns:
            The budgets whose graphs to drop, and True if shared memory must be made again for smaller ones.
        """
        self._count_replays()
        shared = held - sum(own.values())
        fixed = min(shared, SCRATCH) if has_pool else 0
        per_row = (shared - fixed) / max(own).rows
        evicted = self._least_useful(own, per_row, self.most - fixed)
        self._stats.count_evicted(evicted)
        left = {budget: taken for budget, taken in own.items() if budget not in evicted}
        # Of budgets without graphs those stay enabled that may fit: with nothing left, each alone.
        largest = max(left).rows if left else 0
        each = per_row + (0 if left else own[max(own)] / max(own).rows)
        room = (self.most - fixed - sum(left.values())) / max(1e-9, each)
        too_large = [
            budget
            for budget in self._budgets.enabled
            if budget.rows > largest and (budget in evicted or budget.rows > room)
        ]
        for budget in too_large if lazy else {*too_large, *evicted}:
            self._budgets.disable_over_limit(budget, self.most)
        return evicted, bool(too_large)

    def warn_none_fits(self) -> None:
        """Warn once that calls run eager, because there is not enough memory for any graph."""
        if not self._warned:
            self._warned = True
            warn(
                f"no graph fits the limit of {self.most:,} bytes, so all calls run eager: allow more memory, or give "
                "the encoder smaller budgets"
            )

    def admits(self, budget: Budget, calls: float, own: Mapping[Budget, int], held: int) -> bool:
        """Return True if a budget that so many recent calls requested fits, or is worth more than another one.

        More by `MARGIN`, or budgets of about the same worth would take turns. `own` and `held` are as for `evict`.
        """
        if not own:
            return True
        larger = min([one for one in own if one >= budget], default=max(own))  # which takes no less
        if held + own[larger] <= self.most:
            return True
        self._count_replays()
        costs = self._costs
        worth = self._worth(budget, own, costs, calls) / max(1, own[larger]) / (1 + MARGIN)
        return any(self._worth(one, own, costs) / max(1, own[one]) < worth for one in own if one != max(own))

    @property
    def _costs(self) -> Costs:
        return self._budgets.costs.over(self._budgets.budgets)

    def _count_replays(self) -> None:
        """Take in the replays since the last count."""
        now, calls = Counter(self._stats.uses), self._stats.calls
        each = share_of_each(calls - self._recent.now)
        self._recent.count({budget: (count - self._seen[budget]) * each for budget, count in now.items()}, calls)
        self._seen = now

    def _worth(self, budget: Budget, own: Mapping[Budget, int], costs: Costs, requested: float = 0.0) -> float:
        """Return recent calls of a budget times what each saves."""
        return (self._recent.get(budget, 0.0) + requested) * _saved(budget, costs, own)

    def _least_useful(self, own: Mapping[Budget, int], per_row: float, limit: float) -> list[Budget]:
        """Return one budget or more to evict: the least useful for their memory, less those that fit after all.

        Args:
            own: As for `evict`.
            per_row: Bytes that shared memory takes for each row of the largest budget.
            limit: Bytes that may be held.
        """
        costs, left, evicted = self._costs, dict(own), list[Budget]()

        def fits(*more: Budget) -> bool:
            taken = math.fsum(own[budget] for budget in (*left, *more))
            return per_row * max((*left, *more)).rows + taken <= limit

        while left and (not evicted or not fits()):
            rows = sorted((budget.rows for budget in left), reverse=True)
            shared = {max(left): per_row * (rows[0] - rows[1] if len(rows) > 1 else rows[0])}
            freed = {budget: taken + shared.get(budget, 0.0) for budget, taken in left.items()}
            one = min(
                left, key=lambda budget: (self._worth(budget, left, costs) / max(1.0, freed[budget]), -freed[budget])
            )
            evicted.append(one)
            del left[one]
        while len(evicted) > 1 and (fitting := [budget for budget in evicted if fits(budget)]):
            one = max(fitting, key=lambda budget: (self._worth(budget, left, costs), budget))
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
