"""Items to warm up, capture and time with."""

import math

from varlen_graphs.budgets import Budget
from varlen_graphs.layout import Layout, LayoutArgument
from varlen_graphs.segments import Windows


def sample_layout(layout: LayoutArgument, budget: Budget, windows: Windows | None = None) -> Layout:
    """Items that fill `budget`, as even as they can be: what graphs are warmed up, captured and timed with.

    Many moderate items rather than one huge one, so that a module with a limit of its own (a table of positions, say)
    is not driven past it.

    Args:
        layout: What describes items.
        budget: What they fill, as far as its segments go.
        windows: What frames are cut into, if they are: then items are made of whole ones, as most of an image is.
    """
    side = layout.merge
    if windows is not None:  # of a budget that is smaller than a window the largest square
        fits = math.isqrt(min(budget.rows, budget.max_seqlen)) // layout.merge * layout.merge
        side = min(windows.side * layout.merge, fits)
    unit = side**2
    count = max(1, min(budget.items, budget.segments, budget.rows // unit))
    rows = min(-(-budget.rows // count // unit) * unit, min(budget.rows, budget.max_seqlen) // unit * unit)
    if windows is not None:
        rows = min(rows, budget.segments // count * unit)
    count = min(count, budget.rows // rows)
    items = ((1, side, rows // side, *layout.pads),) * count
    return Layout(items, rows if layout.padded else 0, layout.grouped)
