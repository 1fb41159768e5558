"""Decayed call counts by budget."""

from collections.abc import Mapping

from varlen_graphs.budgets.budget import Budget

RECENT = 1000
"""Number of calls of an encoder after which earlier ones count half."""


class Recent(dict[Budget, float]):
    """Decayed call counts by budget: every `RECENT` calls, all earlier ones count half.

    So the counts follow traffic within some thousand calls, however long other traffic lasted before.
    """

    now = 0
    """Number of calls so far, of any budget, at the last count."""

    def count(self, calls: Mapping[Budget, float], now: int) -> None:
        """Count calls that were just made, with `now` calls in all; an empty mapping only updates the decay."""
        kept = 0.5 ** (now // RECENT - self.now // RECENT)
        self.now = now
        for budget in self:
            self[budget] *= kept
        for budget, more in calls.items():
            self[budget] = self.get(budget, 0.0) + more


def share_of_each(calls: int) -> float:
    """Return the weight of each of so many calls whose times are unknown: together at most `RECENT`."""
    return RECENT / max(RECENT, calls)
