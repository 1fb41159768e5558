"""Layouts of synthetic items, for the check of new graphs."""

import math
from collections.abc import Iterator, Sequence

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.samples import sample_item

Sizes = Sequence[tuple[int, int]]
"""Frames, and rows a frame, of some items."""

SMALL: Sequence[Sizes] = [
    [(1, 32), (1, 24), (1, 12)],
    [(1, 12), (1, 8)],
    [(1, 1), (1, 1)],
    [(1, 32)],
    [(1, 8)],
    [(1, 1)],
]
"""Small items, no larger than those of warm-up: a module may have a limit of its own, such as a table of positions."""

MIXED: list[list[tuple[int, int]]] = [
    [(1, 24), (3, 12), (1, 35), (2, 16), (1, 8), (1, 32)],
    [(1, 24), (3, 12), (2, 16), (1, 8)],
    [(3, 12), (1, 24)],
    [(1, 24), (1, 12), (1, 35), (1, 16), (1, 8), (1, 32)],
    [(1, 24), (1, 12)],
]
"""Items of several sizes and numbers of frames; poorer ones where a budget or a module takes no richer ones."""

EDGES: list[Sizes] = [[(1, 23)], [(1, 11), (1, 1), (1, 13)], [(1, 1)]]
"""One item or three, odd numbers of rows, and one row. In fours, lengths of `SMALL`: libraries plan for new ones."""

RICH: Sequence[Sizes] = [
    [(1, 480), (3, 24), (2, 80), (1, 32), (1, 16), (2, 8), (1, 8)],
    [(1, 288), (2, 144), (3, 36), (1, 36), (1, 36)],
    [(1, 120), (3, 12), (1, 24), (2, 16), (1, 12), (1, 8)],
]
"""Items larger than windows and tiles; the sides of the first are even, those of the second are divisible by 6."""

ODD = {5: 9, 40: 15}
"""Rows of two items in `MANY`."""

MANY: Sizes = [(1, ODD.get(at, (8, 24, 16, 16)[at % 4])) for at in range(65)]
"""More items than a module may have in mind that treats them in groups, or as one from some number on.

They have 1,024 rows, so that modules run which see all rows in groups, and two of them odd numbers, which shows that.
"""

LENGTHS: Sizes = [(1, 1 + 7 * at % 32) for at in range(65)]
"""Every length up to 32, for modules that treat some of them in another way."""

VALUES = [(99, -9, 0, 2), (2, -1, 0, 3), (2, 0, 1, 3)]
"""Values of columns, item by item: a module may take fewer of them, or no negative ones."""

ENTERED = 8
"""Rows of the shortest item above that has entries in all outputs."""

FEW_ITEMS = 16
"""Inputs that a batch of the check has at least: modules may see those of a batch in groups of 8 or 16."""

UNEVEN: Sizes = [(1, (8, 24, 12, 16)[at % 4]) for at in range(11)]
"""Items that differ in magnitude: neither they nor a third of them have a round number of rows, as budgets have."""

FEW_ROWS = 512
"""Largest budget in rows for which an eager run of twice its rows is cheap."""


def small(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of a few small items that leave padding in a budget, then any that it holds."""
    layouts = [_layout(spec, sizes) for sizes in SMALL]
    fitting = [layout for layout in layouts if _fits(spec, layout, budget)]
    yield from (layout for layout in fitting if layout.size < budget.rows)
    yield from (layout for layout in fitting if layout.size >= budget.rows)
    yield spec.sample(budget)


def mixed(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of several kinds of items that a budget holds, the richest first."""
    for sizes in (RICH[0], *MIXED):
        if spec.layout.has_frames or all(frames == 1 for frames, _ in sizes):
            yield from (layout for layout in _varied(spec, sizes) if _fits(spec, layout, budget))
    yield from small(spec, budget)


def rich(spec: BufferSpec, largest: Budget) -> Iterator[Layout]:
    """Yield layouts that no budget needs to hold, of several items each, the richest first.

    The others have more rows than the largest budget has if these are few. A batch is as large as its largest budget.
    """
    if spec.layout.one_row:
        yield _layout(spec, [(1, 1)] * max(largest.items, FEW_ITEMS))
    times = 1 + 2 * largest.rows // 20 if largest.rows <= FEW_ROWS else 1
    for sizes in (*RICH, MIXED[1] * (1 + times // 5), [(1, 12), (1, 8)] * times):
        yield from _varied(spec, sizes if spec.layout.has_frames else [(1, rows) for _, rows in sizes])


def many_items(spec: BufferSpec) -> Iterator[Layout]:
    """Yield layouts of many small items, of all lengths if the module takes them; none where each item is one row.

    A module may see all rows in groups of some size: one of the numbers of rows is a multiple of that.
    """
    if not spec.layout.one_row:
        if not (spec.layout.has_frames or spec.layout.has_sides) and spec.row_multiple == 1:
            yield from _varied(spec, LENGTHS)
            if not spec.layout.padded:
                for rows in range(1, 33):
                    yield _layout(spec, [*LENGTHS, (1, rows)])
        yield from _varied(spec, MANY)


def uneven(spec: BufferSpec) -> Iterator[Layout]:
    """Yield a layout of items whose rows are to differ in magnitude."""
    yield _layout(spec, [(1, 1)] * len(UNEVEN) if spec.layout.one_row else UNEVEN)


def single(spec: BufferSpec, largest: Budget) -> Iterator[Layout]:
    """Yield single items of successive lengths, the longest first: errors in the number of entries may repeat by 16."""
    unit = spec.row_multiple
    longest = largest.max_seqlen // unit
    first = max(-(-max(spec.shortest, spec.smallest) // unit), min(17, longest - 15), 1)
    layouts = [_exact_layout(spec, [(1, units * unit)]) for units in range(first, min(first + 15, longest) + 1)]
    yield from (layout for layout in reversed(layouts) if _fits(spec, layout, largest))


def even(spec: BufferSpec) -> Iterator[Layout]:
    """Yield layouts of items of one size, which fill a padded batch."""
    yield from _varied(spec, [(1, 1 if spec.layout.one_row else 24)] * 3)


def edges(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of few items and rows that a budget holds."""
    layouts = [_layout(spec, sizes) for sizes in EDGES]
    yield from (layout for layout in dict.fromkeys(layouts) if _fits(spec, layout, budget))


def full(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of all items, rows or segments of a budget.

    Each of these is used up alone and with the others, because what lies behind the last one differs. Also one of more
    frames, and one of a longer item, than the budget holds if the declaration counts them.
    """
    sizes = [[(1, 1)] * budget.items, [(1, budget.max_seqlen + spec.row_multiple)]]
    sizes += [[(budget.segments + 1, 1)]] * spec.layout.has_frames
    layouts = [_layout(spec, own) for own in sizes]
    layouts.append(spec.sample(budget))
    if not spec.layout.one_row and (all_rows := _all_rows(spec, budget)):
        layouts.append(_exact_layout(spec, all_rows))
    all_segments = [_exact_layout(spec, own) for own in _all_segments(spec, budget)]
    layouts += [layout for layout in all_segments if _fits(spec, layout, budget)][:1]
    yield from (layout for layout in dict.fromkeys(layouts) if _fits(spec, layout, budget))


def _all_rows(spec: BufferSpec, budget: Budget) -> Sizes:
    """Return few items that use all rows of a budget, as long as it holds, but nearly square if they have sides."""
    unit = spec.row_multiple
    longest, left, sizes = min(budget.rows, budget.max_seqlen) // unit, budget.rows // unit, list[tuple[int, int]]()
    while left and longest:
        units = min(left, longest)
        units -= units % math.isqrt(units) if spec.layout.has_sides else 0
        sizes.append((1, units * unit))
        left -= units
    return sizes


def _all_segments(spec: BufferSpec, budget: Budget) -> Iterator[Sizes]:
    """Yield one item or two whose frames, or windows, are all segments of a budget, the richest first."""
    unit, segments = spec.row_multiple, budget.segments
    if spec.usage.windows is not None:
        yield [(1, segments * (spec.usage.windows.side * spec.layout.merge) ** 2)]
    elif spec.layout.has_frames and "frame" in spec.usage.kinds:
        half = segments // 2
        yield from ([(half, rows), (segments - half, unit)] for rows in (2 * unit, unit) if half)
        yield [(segments, unit)]


def longest(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield one item as long as a budget holds."""
    layout = _layout(spec, [(1, budget.max_seqlen // spec.row_multiple * spec.row_multiple)])
    if _fits(spec, layout, budget):
        yield layout


def _varied(spec: BufferSpec, sizes: Sizes) -> Iterator[Layout]:
    """Yield items with several values in each column, then with those of items without any."""
    if spec.layout.columns:
        yield from (_layout(spec, sizes, values) for values in VALUES)
    yield _layout(spec, sizes)


def _layout(spec: BufferSpec, sizes: Sizes, values: Sequence[int] = ()) -> Layout:
    """Return items of these sizes, every other one turned on its side; without values, columns hold their defaults.

    They are longer where items of a few rows have no entries in some output, and, but for the first, uneven where these
    are counted: functions that differ may agree on round numbers.
    """
    scale = max(1, spec.shortest / ENTERED)
    unit, items, columns = spec.row_multiple, [], spec.layout.columns
    for at, (frames, rows) in enumerate(sizes):
        if spec.counts_rows and at:
            rows = max(1, rows - at % 4)
        own_rows = max(1, round(rows * scale / unit), spec.smallest // unit) * unit
        _, h, w, *_ = sample_item(spec.layout, own_rows, spec.layout.merge)
        own = [column.pad if column.default is None else column.default for column in columns]
        if values:
            own = [values[(at + place) % len(values)] for place in range(len(columns))]
        begins = [int(at % 3 != 2)] * spec.layout.grouped  # two of three items begin a group
        sides = (w, h) if spec.layout.has_sides and at % 2 else (h, w)
        items.append((frames, *sides, *own, *begins))
    length = max(t * h * w for t, h, w, *_ in items) if spec.layout.padded else 0
    return Layout(tuple(items), length, spec.layout.grouped)


def _exact_layout(spec: BufferSpec, sizes: Sizes) -> Layout:
    """Return items of exactly these sizes."""
    side = spec.layout.merge if spec.usage.windows is None else spec.layout.merge * spec.usage.windows.side
    sides = [sample_item(spec.layout, rows, spec.layout.merge if rows % side**2 else side) for _, rows in sizes]
    items = tuple((frames, *own[1:]) for (frames, _), own in zip(sizes, sides, strict=True))
    length = max(t * h * w for t, h, w, *_ in items) if spec.layout.padded else 0
    return Layout(items, length, spec.layout.grouped)


def _fits(spec: BufferSpec, layout: Layout, budget: Budget) -> bool:
    return min(layout.rows) >= spec.min_rows and budget.holds(*spec.usage.of(layout))
