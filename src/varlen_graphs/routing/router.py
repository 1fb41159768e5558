"""Choose how a call runs: as replay batches of items with their budgets, or eager."""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_items
from varlen_graphs.errors import BudgetError
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import MARGIN, Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.packing import ReplayBatch, cheapest, pack, single, total_cost
from varlen_graphs.stats import Reason

EAGER_IS_FASTER = "faster without padding"

OnMiss = Literal["eager", "error"]
"""Answer to an item that no budget holds: run it eager, or raise."""


_BUDGET = itemgetter(0)  # of a replay batch: `ReplayBatch.budget`


class Route(NamedTuple):
    """The route of one call: its replay batches, or the reason why it runs eager.

    Attributes:
        batches: The items of each replay, with its budget; none if the call runs eager.
        reason: The reason why it runs eager, if it does.
    """

    batches: Sequence[ReplayBatch] = ()
    reason: str = ""


class Router:
    """Chooses the replay batches of calls.

    Args:
        spec: The declaration.
        budgets: The budgets, and the costs of their replays.
        on_miss: `"eager"` or `"error"`, for an item that no budget holds.
        min_segment_rows: Promised average length of frames or windows that the host cannot see.

    Attributes:
        budgets: As given.
    """

    def __init__(self, spec: BufferSpec, budgets: EnabledBudgets, on_miss: OnMiss, min_segment_rows: int) -> None:
        self.budgets = budgets
        self._spec = spec
        self._on_miss = on_miss
        self._min_segment_rows = min_segment_rows

    def why_wait(self, call: Call) -> str | None:
        """Return the reason why a call must not wait for the pool, but run eager; `None` if it may wait."""
        return None

    def route(self, call: Call, costs: Costs, timed: bool, rejected: Collection[Budget] = ()) -> Route:
        """Choose replay batches at the least cost.

        Items that only the GPU has seen stay there if one budget holds them whatever they are; else they are copied to
        the host, which syncs.

        Args:
            call: The call.
            costs: The budgets it may use, and their costs.
            timed: True if costs were measured for calls like this one.
            rejected: Budgets that failed verification with these static arguments; `costs` has none of them.

        Raises:
            BudgetError: An item that no budget holds, enabled or not, with `on_miss="error"`; or staged rows that no
                single budget holds.
        """
        if call.layout is None:
            items = len(call.description[self._spec.layout.name])
            if (budget := self.unseen(call.rows.shape[0], items, costs)) is not None:
                return Route((ReplayBatch(budget, range(items)),))
            read_items(self._spec, call)
            if call.eager_reason is not None:
                return Route(reason=call.eager_reason)
        layout = call.layout
        assert layout is not None  # noqa: S101 - it was just read
        if call.staged:
            budget = self.single_budget(layout, costs)
            if budget is None:
                return Route(reason=self.why_missing(layout, rejected))
            return Route((ReplayBatch(budget, range(len(layout.items))),))
        batches = self._batches(layout, costs)
        if not any(map(_BUDGET, batches)):
            return Route(reason=self.why_missing(batches[0].layout(layout), rejected))
        all_graphed = timed and costs.measured and all(map(_BUDGET, batches))
        if all_graphed and self._eager_is_faster(total_cost(batches, costs), layout, costs):
            return Route(reason=EAGER_IS_FASTER)
        return Route(batches)

    def unseen(self, rows: int, items: int, costs: Costs) -> Budget | None:
        """Return the budget of one replay of items that the host has not seen; `None` if it has to see them."""
        if rows > self._spec.largest:  # some item may be too large
            return None
        budget = cheapest(Usage(rows, items), costs)
        # A budget that holds less than the items may need would make a legal call come out as NaN, and another one than
        # the cheapest costs more than a look at them.
        fits = budget is not None and budget.holds(*self._spec.usage.most(rows, items, self._min_segment_rows))
        return budget if fits else None

    def whole(self, layout: Layout, costs: Costs, timed: bool) -> Budget | None:
        """Return the budget of one replay of all items, if `route` is certain to choose it; else `None`."""
        budget = single(self._spec.usage.of(layout), costs)
        if budget is None or (timed and costs.measured and self._eager_is_faster(costs.replays[budget], layout, costs)):
            return None
        return budget

    def single_budget(self, layout: Layout, costs: Costs) -> Budget | None:
        """Return the budget of one replay of all items; `None` if the budgets that would hold them are disabled.

        Raises:
            BudgetError: No budget, enabled or not, holds them.
        """
        usage = self._spec.usage.of(layout)
        budget = cheapest(usage, costs)
        if budget is None and not self.budgets.holds(usage):
            raise BudgetError(
                f"a stage is one replay, but no budget holds {usage}: {self.budgets.what_exceeds(usage)}; "
                f"{self.budgets.describe()}; add a larger one, "
                "stage fewer items at a time, or call the encoder with the rows, which splits them"
            )
        return budget

    def check_misses(self, layout: Layout) -> None:
        """Check that budgets hold all items, where an item that none holds is an error.

        Raises:
            BudgetError: None holds one, with `on_miss="error"`.
        """
        if self._on_miss == "error":
            self._batches(layout, self.budgets.costs)

    def fits(self, items: Sequence[Sequence[int]]) -> bool:
        """Return True if some enabled budget holds all of these items."""
        return cheapest(Usage().add(self._spec.usage.of_items(*items)), self.budgets.costs) is not None

    def most(self, call: Call) -> Usage:
        """Return the largest usage that a call can have, by its rows and items and by what is promised."""
        return self._spec.usage.most(call.rows.shape[0], call.items, self._min_segment_rows)

    def why_missing(self, layout: Layout, rejected: Collection[Budget] = ()) -> Reason:
        """Return the reason why items that no budget holds run eager, but disabled ones or rejected ones might."""
        return self.budgets.why_missing(self._spec.usage.of(layout), rejected)

    def _batches(self, layout: Layout, costs: Costs) -> Sequence[ReplayBatch]:
        one = single(self._spec.usage.of(layout), costs)
        if one is not None:
            return (ReplayBatch(one, range(len(layout.items))),)
        usages = [self._spec.usage.of_items(*layout.items[group.start : group.stop]) for group in layout.groups]
        batches = pack(usages, costs)
        misses = [
            one.items[0] for one in batches if one.budget is None and not self.budgets.holds(usages[one.items[0]])
        ]
        if misses and self._on_miss == "error":
            group = layout.groups[misses[0]]
            sizes = [layout.items[i][:3] for i in group]
            what = f"item {group[0]} is {sizes[0]}" if len(group) == 1 else f"items {[*group]}, a group, are {sizes}"
            raise BudgetError(
                f"{what} and needs {usages[misses[0]]}, but {self.budgets.describe()}: "
                f"{self.budgets.what_exceeds(usages[misses[0]])}; add a larger budget, or set on_miss='eager'"
            )
        if not layout.grouped:
            return batches
        return [ReplayBatch(one.budget, [i for group in one.items for i in layout.groups[group]]) for one in batches]

    def _eager_is_faster(self, cost: float, layout: Layout, costs: Costs) -> bool:
        """Return True if a call clearly takes less time eager than by graphs of this cost, if times were measured.

        Never for more rows than the largest budget has, which bounds the memory that a call takes.
        """
        rows = layout.size
        if rows > costs.budgets[-1].rows:
            return False
        graphed = (1 - MARGIN) * cost
        if graphed + costs.per_square * rows * rows <= costs.host:  # no call of so few rows is faster eager
            return False
        if graphed <= costs.exact(rows):  # attention is the same for both
            return False
        squares = self._spec.usage.squares(layout)
        return graphed + (1 - MARGIN) * costs.per_square * squares > costs.eager(rows, squares)
