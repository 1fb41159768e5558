"""Which budgets calls are planned for."""

from varlen_graphs.budgets import Budget
from varlen_graphs.costs import Costs


class InUse:
    """The budgets of an encoder that are in use, what replays of them cost, and why the others are out of use.

    What a budget that is out of use would have held goes to the others, and runs eager where none of them holds it.
    That is so for all static arguments, until the graphs are released. Changed under the pool's lock only.

    Args:
        costs: All budgets, and what replays of them are assumed to cost.

    Attributes:
        costs: Those in use, and what replays of them cost.
        out: Those out of use, and why.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.out: dict[Budget, str] = {}
        self._assumed = costs

    def learn(self, costs: Costs) -> None:
        """Plan by these costs from now on."""
        self.costs = costs.without(self.out)

    def put_out(self, budget: Budget, reason: str) -> None:
        """Take a budget out of use."""
        self.out[budget] = reason
        self.costs = self.costs.without(self.out)

    def put_all_in(self) -> None:
        """Use all budgets again, at the costs that were assumed at first."""
        if self.out:
            self.out = {}
            self.costs = self._assumed

    def describe(self) -> str:
        """How far budgets reach, for messages."""
        largest = f"the largest budget is {self.costs.budgets[-1]}" if self.costs.budgets else "none is in use"
        reasons = [f"; {budget} is out of use: {reason}" for budget, reason in self.out.items()]
        return "".join([largest, *reasons])
