"""Items into replays: which items share a budget, and which rows go where."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from varlen_graphs.budgets import Budget
from varlen_graphs.layout import Layout

REPLAY_COST = 512
"""What a replay costs beside its rows, in rows: two small replays do not beat one that is a little larger."""

EXACT_ITEMS = 8
"""Calls of at most this many items are packed at the least cost; larger ones by a heuristic."""


class Demand(NamedTuple):
    """What one item needs of a budget."""

    rows: int
    segments: int
    longest: int


class Span(NamedTuple):
    """Adjoining items of a call that also adjoin in a replay."""

    row: int
    rows: int
    item: int
    items: int


@dataclass(frozen=True)
class Pack:
    """The items of one replay.

    Attributes:
        budget: The budget they run in; `None` when no budget holds the item, which then runs eager.
        items: Indices of the call's items, in the order they have in the replay.
    """

    budget: Budget | None
    items: tuple[int, ...]

    def layout(self, layout: Layout) -> Layout:
        """The items of this replay, out of those of the call."""
        return Layout(tuple(layout.items[i] for i in self.items))

    def spans(self, layout: Layout) -> Iterator[tuple[Span, Span]]:
        """Where rows and items are in the call and in the replay, as few pairs as possible."""
        starts = list(accumulate(layout.rows, initial=0))
        row = item = 0
        while item < len(self.items):
            first = self.items[item]
            count = 1
            while item + count < len(self.items) and self.items[item + count] == first + count:
                count += 1
            rows = starts[first + count] - starts[first]
            yield Span(starts[first], rows, first, count), Span(row, rows, item, count)
            row += rows
            item += count


def cost(budget: Budget) -> int:
    """What a replay of `budget` costs, in rows."""
    return budget.rows + REPLAY_COST


def pack(demands: Sequence[Demand], budgets: Sequence[Budget]) -> list[Pack]:
    """Split items over replays at the least total cost.

    Every item is in exactly one pack, and no pack exceeds its budget in rows, items, segments or longest segment.
    The cost is never above that of one replay an item, and the least possible for calls of up to `EXACT_ITEMS` items.

    Args:
        demands: What each item needs.
        budgets: Budgets in ascending order.

    Returns:
        Packs in the order of their first items. A pack without a budget holds one item that fits none.
    """
    fitting, packs = [], []
    for i, demand in enumerate(demands):
        if smallest([demand], budgets):
            fitting.append(i)
        else:
            packs.append(Pack(None, (i,)))
    if fitting:
        packs += _Packer(demands, budgets).pack(fitting)
    return sorted(packs, key=lambda pack: pack.items[0])


def smallest(demands: Sequence[Demand], budgets: Sequence[Budget]) -> Budget | None:
    """The cheapest budget that holds all of `demands` in one replay, if there is one."""
    rows = sum(demand.rows for demand in demands)
    segments = sum(demand.segments for demand in demands)
    longest = max(demand.longest for demand in demands)
    return next((b for b in budgets if b.rows >= rows and b.holds(rows, len(demands), segments, longest)), None)


Groups = list[tuple[int, ...]]


class _Packer:
    """One packing problem, with the budget of each group of items looked up once."""

    def __init__(self, demands: Sequence[Demand], budgets: Sequence[Budget]) -> None:
        self.demands = demands
        self.budgets = budgets
        self._smallest: dict[tuple[int, ...], Budget | None] = {}

    def budget(self, group: tuple[int, ...]) -> Budget | None:
        if group not in self._smallest:
            self._smallest[group] = smallest([self.demands[i] for i in group], self.budgets)
        return self._smallest[group]

    def cost(self, groups: Groups) -> int:
        return sum(cost(budget) for budget in map(self.budget, groups) if budget)

    def pack(self, items: list[int]) -> list[Pack]:
        groups = self._split(items)
        return [Pack(self.budget(group), group) for group in (tuple(sorted(group)) for group in groups)]

    def _split(self, items: list[int]) -> Groups:
        one = self.budget(tuple(items))
        total = sum(self.demands[i].rows for i in items)
        if one is not None and (len(items) == 1 or cost(one) <= total + 2 * REPLAY_COST):
            return [tuple(items)]  # any two replays cost at least their rows and twice the price of a replay
        candidates: list[Callable[[list[int]], Groups]] = [self._in_order, self._largest_first, self._first_fit]
        if len(items) <= EXACT_ITEMS:
            candidates = [self._exact]
        return min((split(items) for split in candidates), key=self.cost)

    def _exact(self, items: list[int]) -> Groups:
        """The best partition, by dynamic programming over subsets (3^n steps)."""
        groups = [tuple(item for bit, item in enumerate(items) if mask >> bit & 1) for mask in range(2 ** len(items))]
        prices = [0] + [cost(budget) if (budget := self.budget(group)) else None for group in groups[1:]]
        best: list[tuple[int, int]] = [(0, 0)]
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

    def _in_order(self, items: list[int]) -> Groups:
        """The best partition into runs of neighbours, which also copies least."""
        best: list[tuple[int, int]] = [(0, 0)]
        for end in range(1, len(items) + 1):
            choices = []
            for start in range(end - 1, -1, -1):
                budget = self.budget(tuple(items[start:end]))
                if budget is None:
                    break  # a longer run needs no less
                choices.append((best[start][0] + cost(budget), start))
            best.append(min(choices))
        split, end = [], len(items)
        while end:
            start = best[end][1]
            split.append(tuple(items[start:end]))
            end = start
        return split

    def _largest_first(self, items: list[int]) -> Groups:
        return self._in_order(sorted(items, key=lambda i: -self.demands[i].rows))

    def _first_fit(self, items: list[int]) -> Groups:
        """First fit, largest item first; each group may grow as far as any budget reaches."""
        groups: list[list[int]] = []
        for item in sorted(items, key=lambda i: -self.demands[i].rows):
            for group in groups:
                if self.budget((*group, item)):
                    group.append(item)
                    break
            else:
                groups.append([item])
        return [tuple(group) for group in groups]
