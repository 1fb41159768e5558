"""Tasks of the proof: layouts for its graphs to replay."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.verify.made_up_layouts import (
    edge_layouts,
    full_layouts,
    longest_layouts,
    mixed_layouts,
    small_layouts,
)


class Task(NamedTuple):
    """Layouts for one graph to replay.

    Attributes:
        budget: The budget of the graph.
        layouts: Made-up layouts; it replays the first one that the module takes.
        reorder: If True, also some of its items in another order.
        must_run: If False, the module may refuse them all.
        itself: If False, the declared forward tells what is right, not the module itself: they differ, if they do, in
            smaller layouts too, and modules may run many segments one by one.
    """

    budget: Budget
    layouts: Iterable[Layout]
    reorder: bool = False
    must_run: bool = True
    itself: bool = True


def tasks_of_each(spec: BufferSpec, budgets: Sequence[Budget]) -> list[Task]:
    """Return what every graph replays, the largest first."""
    return [Task(budget, small_layouts(spec, budget)) for budget in sorted(budgets, reverse=True)]


def tasks_of_a_set(spec: BufferSpec, budgets: Sequence[Budget]) -> list[Task]:
    """Return what the graphs of a new set replay in addition: what fails there concerns all of its budgets.

    Edges are those of the smallest budget, and orders those of the smallest one that holds the mixed items: what is
    wrong there is so in every graph, and replays of these are short. The longest item is that of the largest one.
    """
    smallest, largest = min(budgets), max(budgets)
    mixed = spec.needs.load(next(mixed_layouts(spec, largest)))
    ordered = min(budget for budget in budgets if budget.holds(*mixed) or budget is largest)
    edges = [Task(smallest, [layout], must_run=False) for layout in edge_layouts(spec, smallest)]
    edges += [Task(smallest, [layout], must_run=False, itself=False) for layout in full_layouts(spec, smallest)]
    edges += [Task(largest, [layout], must_run=False) for layout in longest_layouts(spec, largest)]
    richest = dict.fromkeys([largest, ordered])
    return [*(Task(budget, mixed_layouts(spec, budget), reorder=budget is ordered) for budget in richest), *edges]
