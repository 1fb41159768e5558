"""How often calls of late used or wanted budgets."""

from collections.abc import Mapping

from varlen_graphs.layout.budgets import Budget

RECENT = 1000
"""After so many calls of an encoder, earlier ones count half as much; and so on."""


class Recent(dict[Budget, float]):
    """Calls by budget. All that came before count half as much, every `RECENT` calls.

    So what is counted follows traffic within some thousand calls, however long another traffic lasted.
    """

    now = 0
    """How many calls there had been, of any budgets, when something was counted last."""

    def count(self, calls: Mapping[Budget, float], now: int) -> None:
        """Count calls that came just now, when there have been so many in all; none to bring it up to date."""
        kept = 0.5 ** (now // RECENT - self.now // RECENT)
        self.now = now
        for budget in self:
            self[budget] *= kept
        for budget, more in calls.items():
            self[budget] = self.get(budget, 0.0) + more


def share_of_each(calls: int) -> float:
    """What each of so many calls counts, if it is not known when it came: together no more than `RECENT`."""
    return RECENT / max(RECENT, calls)
