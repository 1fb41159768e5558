"""A limit on the memory of graphs, arena and pool."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from varlen_graphs.errors import SpecError, warn
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.memory_size import SCRATCH, in_bytes
from varlen_graphs.routing.costs import MARGIN
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.eviction import POLICIES
from varlen_graphs.stats import Stats


@dataclass(frozen=True)
class Memory:
    """A limit on the memory of an encoder, and the policy that keeps it: `GraphedEncoder(..., memory=Memory("2GiB"))`.

    Attributes:
        limit: Bytes, or a text such as `"2GiB"`.
        policy: Name of an eviction policy.

    Raises:
        BudgetError: `limit` is not an amount of memory.
        SpecError: There is no such policy.
    """

    limit: int | str
    policy: str = "least_useful"

    def __post_init__(self) -> None:
        in_bytes(self.limit)
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise SpecError(f"policy={self.policy!r}: expected one of {', '.join(map(repr, POLICIES))}")


class MemoryLimit:
    """Evicts budgets when graphs, arena and pool hold more than a limit.

    Args:
        memory: The limit and its policy.
        budgets: The budgets; those that do not fit are disabled.
        stats: The counters that the policy decides by; evictions are counted here.

    Attributes:
        most: The limit in bytes.
    """

    def __init__(self, memory: Memory, budgets: EnabledBudgets, stats: Stats) -> None:
        self.most = in_bytes(memory.limit)
        self._budgets = budgets
        self._stats = stats
        self._policy = POLICIES[memory.policy]()
        self._warned = False

    def request(self, budgets: Collection[Budget], calls: float) -> None:
        """Take in that so many recent calls requested budgets without a graph."""
        self._policy.record(self._stats.uses, self._stats.calls, dict.fromkeys(budgets, calls))

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
        self._policy.record(self._stats.uses, self._stats.calls)
        shared = held - sum(own.values())
        fixed = min(shared, SCRATCH) if has_pool else 0
        per_row = (shared - fixed) / max(own).rows
        evicted = self._policy.evict(own, per_row, self.most - fixed, self._budgets.costs.over(self._budgets.budgets))
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
        costs = self._budgets.costs.over(self._budgets.budgets)
        self._policy.record(self._stats.uses, self._stats.calls)
        worth = self._policy.worth(budget, own, costs, calls) / max(1, own[larger]) / (1 + MARGIN)
        return any(self._policy.worth(one, own, costs) / max(1, own[one]) < worth for one in own if one != max(own))
