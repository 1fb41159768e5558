"""Hypothesis strategies for items, budgets and the like."""

import math

from hypothesis import strategies as st

import varlen_graphs as vg
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import Costs


@st.composite
def grids(draw, merge=1, max_items=5, max_side=12, max_frames=4):
    """Items as (t, h, w), sides divisible by `merge`."""
    side = st.integers(1, max(1, max_side // merge)).map(lambda n: n * merge)
    return draw(st.lists(st.tuples(st.integers(1, max_frames), side, side), min_size=1, max_size=max_items))


@st.composite
def tables(draw, merge=1):
    """An item table on the CPU with some padding, and the items in it."""
    items = draw(grids(merge=merge))
    layout = vg.GridTHW(merge=merge)
    rows = sum(t * h * w for t, h, w in items)
    budget = vg.budgets.Budget(
        rows=rows + draw(st.integers(0, 30)),
        items=len(items) + draw(st.integers(0, 3)),
        segments=sum(t for t, _, _ in items) + draw(st.integers(0, 5)),
    )
    return items, make_table(items, budget, layout)


def make_table(items, budget, layout):
    """The item table of a budget, as a replay would find it."""
    import torch

    padding = [(0,) * len(items[0])] * (budget.items - len(items))
    return vg.layouts.ItemTable(torch.tensor([*items, *padding]), budget, layout)


usages = st.builds(Usage, st.integers(1, 600), st.integers(1, 3), st.integers(1, 6), st.integers(1, 300))

budgets = st.builds(
    vg.budgets.Budget, st.integers(64, 1500), st.integers(1, 8), st.integers(1, 16), st.integers(100, 400)
)


@st.composite
def costs(draw, most=5):
    """Some budgets, and what replays of them cost: in rows, or any."""
    chosen = draw(st.lists(budgets, min_size=1, max_size=most, unique=True))
    if draw(st.booleans()):
        return Costs.in_rows(chosen)
    return Costs({budget: draw(st.floats(0.1, 50)) for budget in chosen}, host=draw(st.sampled_from([5.0, math.inf])))
