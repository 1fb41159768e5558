"""Pack items into replays."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.needs import Demand, Load
from varlen_graphs.layouts.span import Span, spans_of
from varlen_graphs.routing.costs import Costs

EXACT_ITEMS = 6
"""Largest number of items that are packed at the least cost; more are packed by a heuristic."""

RUN_ITEMS = 64
"""Largest number of items for which the heuristic tries all runs of neighbours, whose number grows with the square."""

OPEN_PACKS = 32
"""Number of packs that the heuristic keeps open, so that its time grows with the items, not with their square."""


class Pack(NamedTuple):
    """The items of one replay.

    Attributes:
        budget: The budget they run in; `None` if no budget holds the item, or the group, which then runs eager.
        items: Indices of the call's items, in their order in the replay.
    """

    budget: Budget | None
    items: Sequence[int]

    def layout(self, layout: Layout) -> Layout:
        """Return the items of this replay, out of those of the call."""
        if len(self.items) == len(layout.items):
            return layout
        return Layout(tuple(layout.items[i] for i in self.items), self._length(layout), layout.grouped)

    def spans(self, layout: Layout, everything: Span | None = None) -> list[tuple[Span, Span]]:
        """Return the places of rows and items in the call and in the replay, in as few pairs as possible.

        Args:
            layout: The items of the call.
            everything: Their span, if it is known.
        """
        if len(self.items) == len(layout.items):
            everything = everything or Span.of(layout)
            if layout.length:
                everything = everything._replace(length=self._length(layout))
            return [(everything, everything)]
        return spans_of(layout, self.items, self._length(layout))

    def _length(self, layout: Layout) -> int:
        """Return the rows of each item of a padded batch that take part: never fewer than are real."""
        if not layout.length:
            return 0
        return min(layout.length, self.budget.max_seqlen if self.budget else max(layout.rows[i] for i in self.items))


def total_cost(packs: Sequence[Pack], costs: Costs) -> float:
    """Return the cost of all replays, without attention and eager runs."""
    total = 0.0
    for pack in packs:
        if pack.budget:
            total += costs.replays[pack.budget]
    return total


def pack(demands: Sequence[Demand], costs: Costs) -> list[Pack]:
    """Split items over replays at the least total cost; an item may stand for a group that stays together.

    Every item is in exactly one pack, and no pack exceeds its budget in rows, items, segments or longest segment. Costs
    in rows never exceed those of one replay an item, and are minimal for up to `EXACT_ITEMS` items. With measured
    costs, a split must save more than they vary by.

    Args:
        demands: Demand of each item.
        costs: The budgets, and the costs of their replays.

    Returns:
        Packs in the order of their first items. A pack without a budget holds one item that fits no budget.
    """
    load = reduce(Load.add, demands, Load())
    one = single(load, costs)
    if one is not None:
        return [Pack(one, range(len(demands)))]
    fitting = [i for i, demand in enumerate(demands) if cheapest(Load().add(demand), costs)]
    packs = [Pack(None, (i,)) for i in set(range(len(demands))).difference(fitting)]
    packs += _Packer(demands, costs).pack(fitting)
    whole = cheapest(load, costs)
    if whole and costs.replays[whole] - total_cost(packs, costs) <= costs.least_saved(len(demands), whole):
        return [Pack(whole, range(len(demands)))]
    return sorted(packs, key=lambda pack: pack.items[0])


def single(load: Load, costs: Costs) -> Budget | None:
    """Return the budget of one replay of everything, if no split could be worth it."""
    one = cheapest(load, costs)
    return one if one is None or load.items == 1 or not costs.may_split(load.rows, load.items, one) else None


def cheapest(load: Load, costs: Costs) -> Budget | None:
    """Return the cheapest budget that holds `load` in one replay, if there is one."""
    _, items, segments, longest = load
    for budget in costs.at_least(load.rows):
        if items <= budget.items and segments <= budget.segments and longest <= budget.max_seqlen:
            return budget
    return None


Split = list[tuple[int, ...]]


class _Packer:
    """Splits items that each fit some budget over replays."""

    def __init__(self, demands: Sequence[Demand], costs: Costs) -> None:
        self._demands = demands
        self._costs = costs

    def pack(self, items: list[int]) -> list[Pack]:
        if len(items) <= EXACT_ITEMS:
            return self._packs(self._exact(items))
        largest_first = sorted(items, key=lambda i: -self._demands[i].rows)
        candidates = [self._first_fit(items), self._first_fit(largest_first)]
        if len(items) <= RUN_ITEMS:
            candidates += [self._neighbours(items), self._neighbours(largest_first)]
        else:
            candidates += [[(item,) for item in items]]  # one replay an item: the bound that runs of neighbours keep
        return min(map(self._packs, candidates), key=lambda packs: total_cost(packs, self._costs))

    def _packs(self, groups: Split) -> list[Pack]:
        return [Pack(self._budget(group), tuple(sorted(group))) for group in groups]

    def _budget(self, group: Sequence[int]) -> Budget | None:
        return cheapest(reduce(Load.add, (self._demands[i] for i in group), Load()), self._costs)

    def _exact(self, items: list[int]) -> Split:
        """Return the best partition, by dynamic programming over subsets (3^n steps)."""
        groups = [tuple(item for bit, item in enumerate(items) if mask >> bit & 1) for mask in range(2 ** len(items))]
        chosen = [self._budget(group) for group in groups[1:]]
        prices = [0.0] + [self._costs.replays[budget] if budget else None for budget in chosen]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for mask in range(1, len(groups)):
            first = mask & -mask  # the pack of the lowest item is chosen first, so each partition is met once
            choices = []
            part = mask
            while part:
                price = prices[part]
                if part & first and price is not None:
                    choices.append((best[mask ^ part][0] + price, part))
                part = (part - 1) & mask
            best.append(min(choices))
        split, mask = [], len(groups) - 1
        while mask:
            part = best[mask][1]
            split.append(groups[part])
            mask ^= part
        return split

    def _neighbours(self, items: list[int]) -> Split:
        """Return the best partition into runs of neighbours; in the order of the call it also copies least."""
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(items) + 1):
            choices, load = [], Load()
            for start in range(end - 1, -1, -1):
                load = load.add(self._demands[items[start]])
                budget = cheapest(load, self._costs)
                if budget is None:
                    break  # a longer run needs no less
                choices.append((best[start][0] + self._costs.replays[budget], start))
            best.append(min(choices))
        split, end = [], len(items)
        while end:
            start = best[end][1]
            split.append(tuple(items[start:end]))
            end = start
        return split

    def _first_fit(self, items: list[int]) -> Split:
        """Put each item into the first of the last groups that some budget holds with it."""
        groups: list[tuple[Load, list[int]]] = []
        for item in items:
            for at in range(max(0, len(groups) - OPEN_PACKS), len(groups)):
                load, group = groups[at]
                fuller = load.add(self._demands[item])
                if cheapest(fuller, self._costs):
                    groups[at] = fuller, [*group, item]
                    break
            else:
                groups.append((Load().add(self._demands[item]), [item]))
        return [tuple(group) for _, group in groups]
