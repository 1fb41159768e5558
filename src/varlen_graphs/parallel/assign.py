"""Which rank encodes which items: by integers alone, so that every rank finds the same."""

import heapq
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from varlen_graphs.routing.costs import Costs

FEMTOSECONDS = 1e12
"""Of a millisecond."""


class Weights(NamedTuple):
    """What encoding costs, as integers: floats that were measured differ from rank to rank.

    Attributes:
        row: The cost of a row.
        square: The cost of attention, for each squared row of a segment.
    """

    row: int = 1
    square: int = 0

    @classmethod
    def of(cls, costs: Costs) -> "Weights":
        """What replays were measured to cost, in femtoseconds; rows alone where none were."""
        if not (costs.measured and costs.budgets):
            return cls()
        largest = costs.budgets[-1]
        row = costs.replays[largest] / largest.rows
        return cls(max(1, round(row * FEMTOSECONDS)), round(costs.per_square * FEMTOSECONDS))

    def cost(self, rows: int, squares: int) -> int:
        """The cost of so many rows, in segments whose squared lengths sum up to `squares`."""
        return self.row * rows + self.square * squares


def assign(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Spread tasks over ranks, the longest first, each to the rank that has least to do.

    No rank is left with more than `4/3 - 1/(3 * ranks)` of what the best assignment leaves the busiest one with. Tasks
    of one cost stay in order from rank to rank, so that those of a rank adjoin where they can.

    Args:
        costs: The cost of each task.
        ranks: How many ranks there are.

    Returns:
        The tasks of each rank, ascending; a rank may have none.
    """
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
