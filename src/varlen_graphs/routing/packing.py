"""Pack items into replays."""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.item_slice import ItemSlice, slices_of
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import Costs

EXACT_ITEMS = 6
"""Largest number of items that are packed at the least cost; more are packed by a heuristic."""

RUN_ITEMS = 64
"""Largest number of items for which the heuristic tries all runs of neighbours, whose number grows with the square."""

OPEN_BATCHES = 32
"""Number of replay batches that the heuristic keeps open: its time grows with the items, not with their square."""

CLOSE = 1.02
"""Ratio to the least cost that any split can have below which the heuristic looks for no better one."""


class ReplayBatch(NamedTuple):
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
        return layout.of([layout.items[i] for i in self.items], self._length(layout))

    def slices(self, layout: Layout, everything: ItemSlice | None = None) -> list[tuple[ItemSlice, ItemSlice]]:
        """Return the slices of rows and items in the call and in the replay, in as few pairs as possible.

        Args:
            layout: The items of the call.
            everything: Their slice, if it is known.
        """
        if len(self.items) == len(layout.items):
            everything = everything or ItemSlice.of(layout)
            if layout.length:
                everything = everything._replace(length=self._length(layout))
            return [(everything, everything)]
        return slices_of(layout, self.items, self._length(layout))

    def _length(self, layout: Layout) -> int:
        """Return the rows of each item of a padded batch that take part: never fewer than are real."""
        if not layout.length:
            return 0
        return min(layout.length, self.budget.max_seqlen if self.budget else max(layout.rows[i] for i in self.items))


def total_cost(batches: Sequence[ReplayBatch], costs: Costs) -> float:
    """Return the cost of all replays, without attention and eager runs."""
    total = 0.0
    for batch in batches:
        if batch.budget:
            total += costs.replays[batch.budget]
    return total


def pack(usages: Sequence[Usage], costs: Costs) -> list[ReplayBatch]:
    """Split items over replays at the least total cost; an item may stand for a group that stays together.

    Every item is in exactly one replay batch, and none exceeds its budget in rows, items, segments or longest segment.
    Costs in rows never exceed those of one replay an item, and are minimal for up to `EXACT_ITEMS` items. With measured
    costs, a split must save more than they vary by.

    Args:
        usages: Usage of each item.
        costs: The budgets, and the costs of their replays.

    Returns:
        Replay batches in the order of their first items. One without a budget holds one item that fits no budget.
    """
    usage = reduce(Usage.add, usages, Usage())
    one = single(usage, costs)
    if one is not None:
        return [ReplayBatch(one, range(len(usages)))]
    fitting = [i for i, usage in enumerate(usages) if cheapest(Usage().add(usage), costs)]
    batches = [ReplayBatch(None, (i,)) for i in set(range(len(usages))).difference(fitting)]
    batches += _Packer(usages, costs).pack(fitting)
    whole = cheapest(usage, costs)
    if whole and costs.replays[whole] - total_cost(batches, costs) <= costs.least_saved(len(usages), whole):
        return [ReplayBatch(whole, range(len(usages)))]
    return sorted(batches, key=lambda batch: batch.items[0])


def single(usage: Usage, costs: Costs) -> Budget | None:
    """Return the budget of one replay of everything, if no split could be worth it."""
    one = cheapest(usage, costs)
    return one if one is None or usage.items == 1 or not costs.may_split(usage.rows, usage.items, one) else None


def cheapest(usage: tuple[int, int, int, int], costs: Costs) -> Budget | None:
    """Return the cheapest budget that holds `usage` in one replay, if there is one."""
    rows, items, segments, longest = usage
    for budget in costs.at_least(rows):
        if items <= budget.items and segments <= budget.segments and longest <= budget.max_seqlen:
            return budget
    return None


Split = list[tuple[int, ...]]


class _Packer:
    """Splits items that each fit some budget over replays."""

    def __init__(self, usages: Sequence[Usage], costs: Costs) -> None:
        self._usages = usages
        self._costs = costs

    def pack(self, items: list[int]) -> list[ReplayBatch]:
        if len(items) <= EXACT_ITEMS:
            return self._batches(self._exact(items))
        close, best, least = CLOSE * self._bound(items), list[ReplayBatch](), math.inf
        for candidate in self._candidates(items):
            cost = total_cost(batches := self._batches(candidate), self._costs)
            if cost < least:
                best, least = batches, cost
            if least <= close:
                break
        return best

    def _candidates(self, items: list[int]) -> Iterator[Split]:
        """Yield splits. Runs of neighbours in the order of the call, the first for few items, copy least."""
        few, largest_first = len(items) <= RUN_ITEMS, sorted(items, key=lambda i: -self._usages[i].rows)
        if few:
            yield self._neighbours(items)
        yield self._first_fit(items)
        yield self._first_fit(largest_first)
        # For many items one replay an item, which is the bound that runs of neighbours keep.
        yield self._neighbours(largest_first) if few else [(item,) for item in items]

    def _bound(self, items: list[int]) -> float:
        """Return a lower bound of the cost of all splits."""
        rows = sum([self._usages[i].rows for i in items])
        return self._costs.lower_bound(rows, -(-rows // self._costs.budgets[-1].rows))

    def _batches(self, groups: Split) -> list[ReplayBatch]:
        return [ReplayBatch(self._budget(group), tuple(sorted(group))) for group in groups]

    def _budget(self, group: Sequence[int]) -> Budget | None:
        return cheapest(reduce(Usage.add, (self._usages[i] for i in group), Usage()), self._costs)

    def _exact(self, items: list[int]) -> Split:
        """Return the best partition, by dynamic programming over subsets (3^n steps)."""
        groups = [tuple(item for bit, item in enumerate(items) if mask >> bit & 1) for mask in range(2 ** len(items))]
        totals = [Usage()]
        for mask in range(1, len(groups)):
            lowest = (mask & -mask).bit_length() - 1
            totals.append(totals[mask & (mask - 1)].add(self._usages[items[lowest]]))
        chosen = [cheapest(total, self._costs) for total in totals[1:]]
        prices = [0.0] + [self._costs.replays[budget] if budget else None for budget in chosen]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for mask in range(1, len(groups)):
            first = mask & -mask  # the batch of the lowest item is chosen first, so each partition is met once
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
        usages, costs, replays = [self._usages[item] for item in items], self._costs, self._costs.replays
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(items) + 1):
            least, first = math.inf, 0
            rows = count = segments = longest = 0
            for start in range(end - 1, -1, -1):  # `Usage.add` would take longer than all else
                own = usages[start]
                rows, count, segments = rows + own[0], count + own[1], segments + own[2]
                longest = own[3] if own[3] > longest else longest
                budget = cheapest((rows, count, segments, longest), costs)
                if budget is None:
                    break  # a longer run uses no less
                cost = best[start][0] + replays[budget]
                if cost <= least:
                    least, first = cost, start
            best.append((least, first))
        split, end = [], len(items)
        while end:
            start = best[end][1]
            split.append(tuple(items[start:end]))
            end = start
        return split

    def _first_fit(self, items: list[int]) -> Split:
        """Put each item into the first of the last groups that some budget holds with it."""
        groups: list[tuple[Usage, list[int]]] = []
        for item in items:
            for at in range(max(0, len(groups) - OPEN_BATCHES), len(groups)):
                usage, group = groups[at]
                fuller = usage.add(self._usages[item])
                if cheapest(fuller, self._costs):
                    groups[at] = fuller, [*group, item]
                    break
            else:
                groups.append((Usage().add(self._usages[item]), [item]))
        return [tuple(group) for _, group in groups]
