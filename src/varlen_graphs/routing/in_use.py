"""Which budgets calls are planned for."""

from collections.abc import Iterable

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.needs import Demand, Load
from varlen_graphs.routing.costs import Costs


class InUse:
    """The budgets of an encoder, those in use, what replays of them cost, and why the others are out of use.

    What a budget that is out of use would have held goes to the others, and runs eager where none of them holds it.
    That is so for all static arguments, until the graphs are released. Changed under the pool's lock only.

    Args:
        costs: All budgets, and what replays of them are assumed to cost.
        settled: Whether all of them have graphs whenever one has.

    Attributes:
        budgets: All budgets, ascending.
        costs: Those in use, and what replays of them cost.
        learned: The same as far as it was measured; `None` before that.
        out: Those out of use, and why.
        settled: Whether every budget that calls were ever planned for has its graphs.
        known: Those whose costs need not be measured.
    """

    def __init__(self, costs: Costs, settled: bool = True) -> None:
        self.budgets = tuple(sorted(costs.replays))
        self.costs = costs
        self.learned: Costs | None = None
        self.out: dict[Budget, str] = {}
        self.settled = settled
        self.known: frozenset[Budget] = frozenset()
        self._over_limit: set[Budget] = set()
        self._assumed = costs

    def learn(self, costs: Costs) -> None:
        """Plan by these costs from now on."""
        self.learned = costs
        self._plan()

    def put_out(self, budget: Budget, reason: str) -> None:
        """Take a budget out of use."""
        self.settled = False
        self.out[budget] = reason
        self._plan()

    def put_over_limit(self, budget: Budget, most: int) -> None:
        """Take a budget out of use that takes more than a limit of so many bytes leaves it."""
        self._over_limit.add(budget)
        self.put_out(budget, f"with it graphs hold more than the limit of {most:,} bytes")

    def put_all_in(self) -> None:
        """Use all budgets again."""
        self._over_limit.clear()
        if self.out:
            self.out = {}
            self._plan()

    def add(self, budget: Budget) -> None:
        """Have one budget more."""
        self._change((*self.budgets, budget))

    def drop(self, budget: Budget) -> None:
        """Have one budget less; one remains."""
        self.out.pop(budget, None)
        self._over_limit.discard(budget)
        self._change([one for one in self.budgets if one != budget])

    def _change(self, budgets: Iterable[Budget]) -> None:
        self.settled = False
        self.budgets = tuple(sorted(budgets))
        self._assumed = self._assumed.over(self.budgets)
        self._plan()

    def _plan(self) -> None:
        costs = self._assumed if self.learned is None else self.learned.over(self.budgets)
        self.costs = costs.without(self.out)

    @property
    def those_in_use(self) -> list[Budget]:
        """The budgets in use, ascending."""
        return [budget for budget in self.budgets if budget not in self.out]

    @property
    def why_none(self) -> str | None:
        """Why no budget is in use, where none is and a limit is the reason."""
        return "no graph fits the limit of memory" if self._over_limit and not self.costs.replays else None

    def knows(self, needed: Demand | Load) -> bool:
        """Whether some budget holds what is needed, in use or not."""
        return any(one.holds(needed.rows, needed.items, needed.segments, needed.longest) for one in self.budgets)

    def why_out(self, budget: Budget) -> str:
        """Why a budget is out of use, if it is, for the end of a message."""
        return f", but out of use until encoder.release(): {self.out[budget]}" if budget in self.out else ""

    def describe(self) -> str:
        """How far budgets reach, for messages."""
        largest = f"the largest budget is {self.costs.budgets[-1]}" if self.costs.budgets else "none is in use"
        reasons = [f"; {budget} is out of use: {reason}" for budget, reason in self.out.items()]
        return "".join([largest, *reasons])
