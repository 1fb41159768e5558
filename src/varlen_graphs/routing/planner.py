"""Which replays a call becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varlen_graphs.errors import BudgetError, SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.needs import Load
from varlen_graphs.routing.costs import MARGIN, Costs
from varlen_graphs.routing.in_use import InUse
from varlen_graphs.routing.packing import Pack, cheapest, pack, single, total_cost
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call


@dataclass
class Planner:
    """Chooses budgets for calls.

    Attributes:
        spec: What items need of a budget.
        in_use: The budgets, and what replays of them cost; measured costs take the place of assumed ones.
        on_miss: What becomes of an item that no budget holds.
        min_segment_rows: What frames or windows that the host cannot see are promised to have on average.
    """

    spec: BufferSpec
    in_use: InUse
    on_miss: Literal["eager", "error"]
    min_segment_rows: int

    def __post_init__(self) -> None:
        if self.min_segment_rows < 1:
            raise SpecError(f"min_segment_rows={self.min_segment_rows}: expected an integer of at least 1")

    @property
    def costs(self) -> Costs:
        """The budgets in use, and what replays of them cost."""
        return self.in_use.costs

    def packs(self, layout: Layout, costs: Costs | None = None) -> list[Pack]:
        """The replays of a call, at the least cost; of `costs`, if given, which are those of some of the budgets.

        Raises:
            BudgetError: An item that no budget holds, in use or not, with `on_miss="error"`.
        """
        costs = costs or self.costs
        one = single(self.spec.needs.load(layout), costs)
        if one is not None:
            return [Pack(one, range(len(layout)))]
        demands = [self.spec.needs.demand(*layout.items[group.start : group.stop]) for group in layout.groups]
        packs = pack(demands, costs)
        misses = [one.items[0] for one in packs if one.budget is None and not self.in_use.knows(demands[one.items[0]])]
        if misses and self.on_miss == "error":
            group = layout.groups[misses[0]]
            sizes = [layout.items[i][:3] for i in group]
            what = f"item {group[0]} is {sizes[0]}" if len(group) == 1 else f"items {[*group]}, a group, are {sizes}"
            raise BudgetError(
                f"{what} and needs {demands[misses[0]]}, but {self.in_use.describe()}; add a larger budget, or set "
                "on_miss='eager'"
            )
        if not layout.grouped:
            return packs
        return [Pack(one.budget, [i for group in one.items for i in layout.groups[group]]) for one in packs]

    def eager_is_faster(self, packs: Sequence[Pack], layout: Layout) -> bool:
        """Whether the call takes clearly less time without graphs and without padding, as far as times were measured.

        Never of more rows than the largest budget has: the memory that a call takes is bounded by that.
        """
        costs, rows = self.costs, layout.size
        if not costs.measured or any(one.budget not in costs.replays for one in packs) or rows > costs.budgets[-1].rows:
            return False
        graphed = (1 - MARGIN) * total_cost(packs, costs)
        if graphed <= costs.exact(rows):  # attention is the same for both
            return False
        squares = self.spec.needs.squares(layout)
        return graphed + (1 - MARGIN) * costs.per_square * squares > costs.eager(rows, squares)

    def whole(self, layout: Layout, costs: Costs | None = None) -> Budget | None:
        """The budget of one replay of everything; `None` where those that would hold it are out of use.

        Of `costs`, if given, which are those of some of the budgets.

        Raises:
            BudgetError: There is none.
        """
        load = self.spec.needs.load(layout)
        budget = cheapest(load, costs or self.costs)
        if budget is None and not self.in_use.knows(load):
            raise BudgetError(
                f"a stage is one replay, but no budget holds {load}: {self.in_use.describe()}; add a larger one, stage "
                "fewer items at a time, or call the encoder with the rows, which splits them"
            )
        return budget

    def unseen(self, call: Call, costs: Costs | None = None) -> Budget | None:
        """The budget of one replay of items that only the GPU has seen; of `costs`, as for `packs`.

        It must hold whatever the layout may say, because the host learns too late if it does not: a legal call must
        never come out as NaN. `None`: the items are on the host, or it must see them, because the cheapest budget for
        so many rows and items does not hold everything they may be. Another one would cost more than a look.
        """
        if self.spec.needs_layout or not self.spec.is_on(call.description, call.rows.device):
            return None
        rows = call.rows.shape[0]
        if rows > self.spec.largest:  # some item may be too large
            return None
        budget = cheapest(Load(rows, call.items), costs or self.costs)
        return budget if budget is not None and budget.holds(*self.most(call)) else None

    def most(self, call: Call) -> Load:
        """The most that a call can need of a budget, by its numbers of rows and items and by what is promised."""
        return self.spec.needs.most(call.rows.shape[0], call.items, self.min_segment_rows)
