"""What an encoder does to stay under a limit of memory."""

from collections.abc import Collection, Mapping

from varlen_graphs.errors import warn
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.memory_size import SCRATCH
from varlen_graphs.routing.costs import MARGIN
from varlen_graphs.routing.eviction import Use, least_useful
from varlen_graphs.routing.in_use import InUse
from varlen_graphs.stats import Stats


class Limit:
    """Decides which budgets are worth their memory.

    Args:
        most: What graphs, pool and arena may hold, bytes.
        in_use: The budgets. Told which are too much.
        stats: Tells how many calls there were, and how often budgets were replayed; counts those that were given up.

    Attributes:
        most: As given.
    """

    def __init__(self, most: int, in_use: InUse, stats: Stats) -> None:
        self.most = most
        self._in_use = in_use
        self._stats = stats
        self._use = Use()
        self._told = False

    def want(self, budgets: Collection[Budget], calls: float) -> None:
        """Take in that so many recent calls wanted budgets without a graph."""
        self._use.look(self._stats.replays, self._stats.calls, dict.fromkeys(budgets, calls))

    def give_up(self, own: Mapping[Budget, int], held: int, has_pool: bool, lazy: bool) -> tuple[list[Budget], bool]:
        """Take budgets out of use, so that what is left may fit.

        Args:
            own: What the graphs of each budget take beside memory that all share, bytes.
            held: What all hold together.
            has_pool: Whether some of that is a pool, which has scratch memory.
            lazy: Whether budgets of which others are left that are larger may come back.

        Returns:
            The budgets whose graphs are to go, and whether shared memory is to be made anew, for smaller ones.
        """
        self._use.look(self._stats.replays, self._stats.calls)
        shared = held - sum(own.values())
        fixed = min(shared, SCRATCH) if has_pool else 0
        per_row = (shared - fixed) / max(own).rows
        costs = self._in_use.costs.over(self._in_use.budgets)
        gone = least_useful(own, per_row, self.most - fixed, self._use, costs)
        self._stats.count_evicted(gone)
        left = {budget: taken for budget, taken in own.items() if budget not in gone}
        # Of budgets without graphs those stay in use that may fit: with nothing left, each alone.
        largest = max(left).rows if left else 0
        each = per_row + (0 if left else own[max(own)] / max(own).rows)
        room = (self.most - fixed - sum(left.values())) / max(1e-9, each)
        too_large = [
            budget
            for budget in self._in_use.those_in_use
            if budget.rows > largest and (budget in gone or budget.rows > room)
        ]
        for budget in too_large if lazy else {*too_large, *gone}:
            self._in_use.put_over_limit(budget, self.most)
        return gone, bool(too_large)

    def tell_none_fits(self) -> None:
        """Say that calls run eager, because there is not enough memory for any graph."""
        if not self._told:
            self._told = True
            warn(
                f"no graph fits the limit of {self.most:,} bytes, so all calls run eager: allow more memory, or give "
                "the encoder smaller budgets"
            )

    def admits(self, budget: Budget, calls: float, own: Mapping[Budget, int], held: int) -> bool:
        """Whether a budget that so many recent calls wanted is worth its memory: some is left, or others have less use.

        Less by `MARGIN`, or budgets of about the same use would take turns. `own` and `held` are as for `give_up`.
        """
        if not own:
            return True
        larger = min([one for one in own if one >= budget], default=max(own))  # which takes no less
        if held + own[larger] <= self.most:
            return True
        costs = self._in_use.costs.over(self._in_use.budgets)
        self._use.look(self._stats.replays, self._stats.calls)
        worth = self._use.of(budget, costs, own, calls) / max(1, own[larger]) / (1 + MARGIN)
        return any(self._use.of(one, costs, own) / max(1, own[one]) < worth for one in own if one != max(own))
