"""Items to warm up, capture and time with."""

import math

from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.segments import Windows


def sample_layout(layout: LayoutArgument, budget: Budget, windows: Windows | None = None) -> Layout:
    """Items that fill `budget`, as even as they can be: what graphs are warmed up, captured and timed with.

    Many moderate items rather than one huge one, and squares rather than strips, so that a module with a limit of its
    own (tables of positions, say) is not driven past it.

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
    units = min(-(-budget.rows // count // unit), min(budget.rows, budget.max_seqlen) // unit)
    if windows is not None:
        units = min(units, budget.segments // count)
    if layout.has_sides:
        units -= units % math.isqrt(units)  # what squares nearly: never a prime number
    segments = 1 if windows is None else units
    count = min(budget.items, budget.segments // segments, budget.rows // (units * unit))
    items = (sample_item(layout, units * unit, side),) * count
    return Layout(items, units * unit if layout.padded else 0, layout.grouped)


def sample_item(layout: LayoutArgument, rows: int, side: int) -> tuple[int, ...]:
    """One item of so many rows, as square as blocks of `side` rows a side make it, where items have sides."""
    blocks = rows // side**2
    high = math.isqrt(blocks) if layout.has_sides else 1
    while blocks % high:
        high -= 1
    return (1, high * side, blocks // high * side, *layout.pads)
