"""Which replays a call becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varlen_graphs.budgets import Budget
from varlen_graphs.call import Call
from varlen_graphs.errors import BudgetError, SpecError
from varlen_graphs.layout import Layout
from varlen_graphs.packing import Pack, pack, single, smallest
from varlen_graphs.spec import BufferSpec


@dataclass(frozen=True)
class Planner:
    """Chooses budgets for calls.

    Attributes:
        spec: What items need of a budget.
        budgets: The budgets, ascending.
        on_miss: What becomes of an item that no budget holds.
        min_segment_rows: What frames that the host cannot see are promised to have on average.
    """

    spec: BufferSpec
    budgets: Sequence[Budget]
    on_miss: Literal["eager", "error"]
    min_segment_rows: int

    def __post_init__(self) -> None:
        if self.min_segment_rows < 1:
            raise SpecError(f"min_segment_rows={self.min_segment_rows}: expected an integer of at least 1")

    def packs(self, layout: Layout) -> list[Pack]:
        """The replays of a call, at the least cost.

        Raises:
            BudgetError: An item that no budget holds, with `on_miss="error"`.
        """
        one = single(self.spec.load(layout), self.budgets)
        if one is not None:
            return [Pack(one, range(len(layout)))]
        packs = pack([self.spec.demand(item) for item in layout.items], self.budgets)
        misses = [one.items[0] for one in packs if one.budget is None]
        if misses and self.on_miss == "error":
            item = layout.items[misses[0]]
            raise BudgetError(
                f"item {misses[0]} is {item[:3]} and needs {self.spec.demand(item)}, but the largest budget is "
                f"{self.budgets[-1]}; add a larger budget, or set on_miss='eager'"
            )
        return packs

    def whole(self, layout: Layout) -> Budget:
        """The budget of one replay of everything.

        Raises:
            BudgetError: There is none.
        """
        load = self.spec.load(layout)
        budget = smallest(load, self.budgets)
        if budget is None:
            raise BudgetError(
                f"a stage is one replay, but no budget holds {load}: the largest is {self.budgets[-1]}; add a larger "
                "one, stage fewer items at a time, or call the encoder with the rows, which splits them"
            )
        return budget

    def unseen(self, call: Call) -> Budget | None:
        """The budget of one replay of items that only the GPU has seen.

        It must hold whatever the layout may say, because the host learns too late if it does not: a legal call must
        never come out as NaN. `None`: the items are on the host, or it must see them.
        """
        if self.spec.host_buffers or not self.spec.is_on(call.description, call.rows.device):
            return None
        return smallest(self.spec.most(call.rows.shape[0], call.items, self.min_segment_rows), self.budgets)
