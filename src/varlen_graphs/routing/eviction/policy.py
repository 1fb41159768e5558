"""The interface of an eviction policy."""

from collections.abc import Mapping
from typing import Protocol

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.costs import Costs


class EvictionPolicy(Protocol):
    """Decides which budgets are worth their memory. One object serves one encoder."""

    def record(
        self, replays: Mapping[Budget, int], calls: int, requested: Mapping[Budget, float] | None = None
    ) -> None:
        """Take in what calls did.

        Args:
            replays: Number of replays of each budget so far.
            calls: Number of calls so far.
            requested: Number of recent calls that requested budgets without a graph.
        """

    def evict(self, own: Mapping[Budget, int], per_row: float, limit: float, costs: Costs) -> list[Budget]:
        """Return the budgets to evict so that the rest fits; at least one.

        Args:
            own: Bytes that the graphs of each budget take beside shared memory.
            per_row: Bytes that shared memory takes for each row of the largest budget.
            limit: Bytes that may be held.
            costs: Costs of replays, of all budgets.
        """

    def worth(self, budget: Budget, own: Mapping[Budget, int], costs: Costs, requested: float = 0.0) -> float:
        """Return how useful a budget is beside those in `own`; `requested` recent calls requested it."""
