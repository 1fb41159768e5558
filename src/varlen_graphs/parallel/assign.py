"""Assign items to ranks. Uses integers only, so that every rank computes the same assignment."""

import heapq
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from varlen_graphs.routing.costs import Costs

FEMTOSECONDS = 1e12
"""Femtoseconds per millisecond."""


class Weights(NamedTuple):
    """Costs of encoding, as integers: measured floats differ from rank to rank."""

    row: int = 1
    square: int = 0  # of attention, per squared row of a segment

    @classmethod
    def of(cls, costs: Costs) -> "Weights":
        """Convert measured costs to femtoseconds; count rows if nothing was measured."""
        if not (costs.measured and costs.budgets):
            return cls()
        largest = costs.budgets[-1]
        row = costs.replays[largest] / largest.rows
        return cls(max(1, round(row * FEMTOSECONDS)), round(costs.per_square * FEMTOSECONDS))

    def cost(self, rows: int, squares: int) -> int:
        """Return the cost of rows in segments whose squared lengths add up to `squares`."""
        return self.row * rows + self.square * squares


def assign(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign tasks to ranks, the costliest first, each to the rank with the least load; return each rank's tasks."""
    # The largest load is at most `4/3 - 1/(3 * ranks)` of that of an optimal assignment. Tasks of equal cost stay in
    # order from rank to rank, so that the tasks of a rank are adjacent if possible.
    tasks: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    longest_first = sorted(range(len(costs)), key=lambda task: -costs[task])
    for cost, group in groupby(longest_first, key=costs.__getitem__):
        equal, owners = list(group), []
        for _ in equal:
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + cost, rank))
            owners.append(rank)
        for task, rank in zip(equal, sorted(owners), strict=True):
            tasks[rank].append(task)
    return [sorted(own) for own in tasks]
