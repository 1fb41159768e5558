"""Sample items for warm-up, capture and timing."""

import math

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.segments import Windows


def sample_layout(layout: LayoutArgument, budget: Budget, windows: Windows | None = None, min_rows: int = 1) -> Layout:
    """Return items of nearly equal size that fill `budget`, as far as its segments allow; `windows` are kept whole.

    Each has `min_rows` rows at least, if the budget holds such an item.
    """
    # Many moderate items rather than one huge one, and squares rather than strips: a module with a limit of its own,
    # such as the size of a position table, is not driven past it.
    side = layout.merge
    if windows is not None:  # a budget smaller than a window gets the largest square that fits
        fits = math.isqrt(min(budget.rows, budget.max_seqlen)) // layout.merge * layout.merge
        side = min(windows.side * layout.merge, fits)
    unit = side**2
    count = max(1, min(budget.items, budget.segments, budget.rows // max(unit, min_rows)))
    longest = max(unit, min(budget.rows, budget.max_seqlen))  # without segments, `max_seqlen` may be anything
    units = min(-(-budget.rows // count // unit), longest // unit)
    if windows is not None:
        units = min(units, budget.segments // count)
    if layout.has_sides:
        units -= units % math.isqrt(units)  # nearly a square, never a prime number
    segments = 1 if windows is None else units
    count = min(budget.items, budget.segments // segments, budget.rows // (units * unit))
    return layout.layout([sample_item(layout, units * unit, side)] * count)


def sample_item(layout: LayoutArgument, rows: int, side: int) -> tuple[int, ...]:
    """Return one item of `rows` rows, as square as blocks of `side * side` rows allow if items have sides."""
    if layout.one_row:
        return (1, 1, 1, *layout.pads)
    blocks = rows // side**2
    high = math.isqrt(blocks) if layout.has_sides else 1
    while blocks % high:
        high -= 1
    return (1, high * side, blocks // high * side, *layout.pads)
