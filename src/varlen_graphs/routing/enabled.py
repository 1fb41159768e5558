"""The budgets of an encoder: enabled ones, their costs, and why others are disabled."""

from collections.abc import Collection, Iterable, Mapping

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import counted
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import Costs
from varlen_graphs.stats import Reason

TOO_LARGE = "larger than every budget"
CAPTURE_FAILED = "its budget could not be captured"
WRONG_OUTPUT = "its budget gave a wrong output"
UNSETTLED = "the module changes again and again"
VERIFICATION_FAILED = "its budget failed verification"
OVER_LIMIT = "its budget exceeds the memory limit"
LEFT_OUT = "its default budget takes too much memory or time"
"""Reasons in `stats.eager` for calls that a disabled or rejected budget would have held."""


class EnabledBudgets:
    """Enabled budgets, their costs, and why others are disabled.

    Calls that a disabled budget would have held use other budgets, or run eager if none holds them. This holds for all
    static arguments, until the graphs are released. Changed under the pool's lock only; each change makes new `costs`.

    Args:
        costs: All budgets, and the assumed costs of their replays.
        defaults: Those that nobody asked for.

    Attributes:
        defaults: As given; some may be left out, because they take too much memory or time.
        budgets: All budgets, ascending.
        costs: The enabled budgets, and the costs of their replays.
        measured: The measured costs, disabled budgets included; `None` before anything was measured.
        disabled: The disabled budgets, and the evidence why.
        known: Budgets whose costs need not be measured.
    """

    def __init__(self, costs: Costs, defaults: Collection[Budget] = ()) -> None:
        self.defaults = frozenset(defaults)
        self.budgets = tuple(sorted(costs.replays))
        self.costs = costs
        self.measured: Costs | None = None
        self.disabled: dict[Budget, str] = {}
        self.known: frozenset[Budget] = frozenset()
        self._causes: dict[Budget, str] = {}
        self._assumed = costs

    @property
    def enabled(self) -> list[Budget]:
        """The enabled budgets, ascending."""
        return [budget for budget in self.budgets if budget not in self.disabled]

    def covering(self, step: float) -> list[Budget]:
        """Return enabled budgets, of which one holds what any other holds, in at most `step` times its rows."""
        chosen = list[Budget]()
        for budget in reversed(self.enabled):
            if not any(one.rows <= step * budget.rows and one.holds(*budget) for one in chosen):
                chosen.append(budget)
        return chosen

    def learn(self, costs: Costs) -> None:
        """Use these costs from now on."""
        self.measured = costs
        self._renew()

    def disable(self, budget: Budget, cause: str, evidence: str) -> None:
        """Disable a budget.

        Args:
            budget: The budget.
            cause: Reason in `stats.eager` for calls that it would have held, one of few: a constant of this module.
            evidence: What happened, for reports and messages.
        """
        self._causes[budget] = cause
        self.disabled[budget] = evidence
        self._renew()

    def disable_over_limit(self, budget: Budget, most: int) -> None:
        """Disable a budget that does not fit into a memory limit of so many bytes."""
        self.disable(budget, OVER_LIMIT, f"with it graphs hold more than the limit of {most:,} bytes")

    def leave_out(self, budgets: Mapping[Budget, str]) -> None:
        """Disable default budgets that take too much memory or time, with the reasons."""
        for budget, reason in budgets.items():
            self._causes[budget], self.disabled[budget] = LEFT_OUT, reason
        self._renew()

    @property
    def left_out(self) -> list[Budget]:
        """The default budgets that take too much memory or time."""
        causes = dict(self._causes)  # a copy: another thread may change it
        return sorted(budget for budget, cause in causes.items() if cause == LEFT_OUT)

    def enable_all(self) -> None:
        """Enable all budgets again."""
        if self.disabled:
            self._causes = {}
            self.disabled = {}
            self._renew()

    def add(self, budget: Budget) -> None:
        """Add a budget."""
        self._change((*self.budgets, budget))

    def drop(self, budget: Budget) -> None:
        """Remove a budget; at least one must remain."""
        self.disabled.pop(budget, None)
        self._causes.pop(budget, None)
        self.defaults -= {budget}
        self._change([one for one in self.budgets if one != budget])

    @property
    def none_fits(self) -> bool:
        """True if no budget is enabled because of a memory limit."""
        return OVER_LIMIT in self._causes.values() and not self.costs.replays

    def why_missing(self, needed: Usage, rejected: Collection[Budget] = ()) -> Reason:
        """Return the reason why no budget holds what is needed: what rules out the smallest that would."""
        causes = dict.fromkeys(rejected, VERIFICATION_FAILED) | self._causes  # a copy: another thread may change it
        ruled_out = next((budget for budget in sorted(causes) if _holds(budget, needed)), None)
        if ruled_out is None:
            return Reason(TOO_LARGE, self.what_exceeds(needed))
        return Reason(causes[ruled_out], self.disabled.get(ruled_out, ""))

    def what_exceeds(self, needed: Usage) -> str:
        """Return which capacity no budget has, with the number needed and the largest; empty if one holds it all."""
        axes = (
            ("rows", needed.rows, counted(needed.rows, "row")),
            ("items", needed.items, counted(needed.items, "item")),
            ("segments", needed.segments, counted(needed.segments, "segment")),
            ("max_seqlen", needed.longest, f"a segment of {counted(needed.longest, 'row')}"),
        )
        budgets = list(self.budgets)
        for axis, number, text in axes:
            most, of_all = (max(getattr(budget, axis) for budget in some) for some in (budgets, self.budgets))
            if number > most:
                as_large = "" if most == of_all else " as large otherwise"
                return f"{text}, and no budget{as_large} has more than {most}"
            budgets = [budget for budget in budgets if getattr(budget, axis) >= number]
        return ""

    def holds(self, needed: Usage) -> bool:
        """Return True if some budget, enabled or not, holds what is needed."""
        return any(_holds(budget, needed) for budget in self.budgets)

    def why_disabled(self, budget: Budget) -> str:
        """Return the reason why a budget is disabled, for the end of a message; empty if it is enabled."""
        reason = self.disabled.get(budget)
        return "" if reason is None else f", but disabled until encoder.release(): {reason}"

    def describe(self) -> str:
        """Return the reach of the budgets, for messages."""
        largest = f"the largest budget is {self.costs.budgets[-1]}" if self.costs.budgets else "no budget is enabled"
        reasons = [f"; {budget} is disabled: {reason}" for budget, reason in self.disabled.items()]
        return "".join([largest, *reasons])

    def _change(self, budgets: Iterable[Budget]) -> None:
        self.budgets = tuple(sorted(budgets))
        self._assumed = self._assumed.over(self.budgets)
        self._renew()

    def _renew(self) -> None:
        costs = self._assumed if self.measured is None else self.measured.over(self.budgets)
        self.costs = costs.without(self.disabled)


def _holds(budget: Budget, needed: Usage) -> bool:
    return budget.holds(needed.rows, needed.items, needed.segments, needed.longest)
