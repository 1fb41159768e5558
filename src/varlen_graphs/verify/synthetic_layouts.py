"""Layouts of synthetic items, for the check of new graphs."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

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


class SyntheticLayouts:
    """Makes items of sizes that modules treat in ways of their own.

    Args:
        spec: The declaration.
        layout: The items of the call whose rows they have; `None` if there is none.
    """

    def __init__(self, spec: BufferSpec, layout: Layout | None) -> None:
        self._spec = spec
        self._items = () if layout is None else layout.items
        own: list[Callable[[int], Sequence[int]]] = [partial(self._turned, values) for values in VALUES]
        self._values = [*own, self._of_call] if self._items else own

    def _turned(self, values: Sequence[int], at: int) -> Sequence[int]:
        """Return values of the columns of an item, by its index."""
        return [values[(at + place) % len(values)] for place in range(len(self._spec.layout.columns))]

    def _of_call(self, at: int) -> Sequence[int]:
        """Return the values of the columns of an item of the call."""
        return self._items[at % len(self._items)][3 : 3 + len(self._spec.layout.columns)]

    def _plain(self, at: int) -> Sequence[int]:
        """Return the defaults of columns; without one, what the call has, or the pad."""
        pads = self._of_call(at) if self._items else self._spec.layout.pads
        columns = self._spec.layout.columns
        return [pad if one.default is None else one.default for one, pad in zip(columns, pads, strict=False)]

    def small(self, budget: Budget) -> Iterator[Layout]:
        """Yield layouts of a few small items that leave padding in a budget, then any that it holds."""
        layouts = [self._layout(sizes) for sizes in SMALL]
        fitting = [layout for layout in layouts if self._fits(layout, budget)]
        yield from (layout for layout in fitting if layout.size < budget.rows)
        yield from (layout for layout in fitting if layout.size >= budget.rows)
        yield self._spec.sample(budget)

    def mixed(self, budget: Budget) -> Iterator[Layout]:
        """Yield layouts of several kinds of items that a budget holds, the richest first."""
        for sizes in (RICH[0], *MIXED):
            if self._spec.layout.has_frames or all(frames == 1 for frames, _ in sizes):
                yield from (layout for layout in self._varied(sizes) if self._fits(layout, budget))
        yield from self.small(budget)

    def rich(self, largest: Budget) -> Iterator[Layout]:
        """Yield layouts that no budget needs to hold, of several items each, the richest first.

        The others have more rows than the largest budget if that has few. A batch is as large as its largest budget.
        """
        if self._spec.layout.one_row:
            yield self._layout([(1, 1)] * max(largest.items, FEW_ITEMS))
        times = 1 + 2 * largest.rows // 20 if largest.rows <= FEW_ROWS else 1
        for sizes in (*RICH, MIXED[1] * (1 + times // 5), [(1, 12), (1, 8)] * times):
            yield from self._varied(sizes if self._spec.layout.has_frames else [(1, rows) for _, rows in sizes])

    def many_items(self) -> Iterator[Layout]:
        """Yield layouts of many small items, of all lengths if the module takes them; none where each item is one row.

        A module may see all rows in groups of some size: one of the numbers of rows is a multiple of that.
        """
        if not self._spec.layout.one_row:
            if not (self._spec.layout.has_frames or self._spec.layout.has_sides) and self._spec.row_multiple == 1:
                yield from self._varied(LENGTHS)
                if not self._spec.layout.padded:
                    for rows in range(1, 33):
                        yield self._layout([*LENGTHS, (1, rows)])
            yield from self._varied(MANY)

    def uneven(self) -> Iterator[Layout]:
        """Yield a layout of items whose rows are to differ in magnitude."""
        yield self._layout([(1, 1)] * len(UNEVEN) if self._spec.layout.one_row else UNEVEN)

    def single(self, largest: Budget) -> Iterator[Layout]:
        """Yield single items of successive lengths, the longest first: wrong numbers of entries may repeat by 16."""
        unit = self._spec.row_multiple
        longest = largest.max_seqlen // unit
        first = max(-(-max(self._spec.shortest, self._spec.smallest) // unit), min(17, longest - 15), 1)
        layouts = [self._exact_layout([(1, units * unit)]) for units in range(first, min(first + 15, longest) + 1)]
        yield from (layout for layout in reversed(layouts) if self._fits(layout, largest))

    def even(self) -> Iterator[Layout]:
        """Yield layouts of items of one size, which fill a padded batch."""
        yield from self._varied([(1, 1 if self._spec.layout.one_row else 24)] * 3)

    def edges(self, budget: Budget) -> Iterator[Layout]:
        """Yield layouts of few items and rows that a budget holds."""
        layouts = [self._layout(sizes) for sizes in EDGES]
        yield from (layout for layout in dict.fromkeys(layouts) if self._fits(layout, budget))

    def with_room(self, budgets: Sequence[Budget]) -> Iterator[tuple[Budget, Layout]]:
        """Yield such layouts, each with the budgets that it leaves padding in."""
        for layout in dict.fromkeys(self._layout(sizes) for sizes in EDGES):
            fitting = (budget for budget in budgets if layout.size < budget.rows and self._fits(layout, budget))
            yield from ((budget, layout) for budget in fitting)

    def full(self, budget: Budget) -> Iterator[Layout]:
        """Yield layouts of all items, rows or segments of a budget.

        Each of these is used up alone and with the others, because what lies behind the last one differs. Also one of
        more frames, and one of a longer item, than the budget holds if the declaration counts them.
        """
        sizes = [[(1, 1)] * budget.items, [(1, budget.max_seqlen + self._spec.row_multiple)]]
        sizes += [[(budget.segments + 1, 1)]] * self._spec.layout.has_frames
        layouts = [self._layout(own) for own in sizes]
        layouts.append(self._spec.sample(budget))
        if not self._spec.layout.one_row and (all_rows := self._all_rows(budget)):
            layouts.append(self._exact_layout(all_rows))
        all_segments = [self._exact_layout(own) for own in self._all_segments(budget)]
        layouts += [layout for layout in all_segments if self._fits(layout, budget)][:1]
        yield from (layout for layout in dict.fromkeys(layouts) if self._fits(layout, budget))

    def _all_rows(self, budget: Budget) -> Sizes:
        """Return few items that use all rows of a budget, as long as it holds, but nearly square if they have sides."""
        unit = self._spec.row_multiple
        longest, left, sizes = min(budget.rows, budget.max_seqlen) // unit, budget.rows // unit, list[tuple[int, int]]()
        while left and longest:
            units = min(left, longest)
            units -= units % math.isqrt(units) if self._spec.layout.has_sides else 0
            sizes.append((1, units * unit))
            left -= units
        return sizes

    def _all_segments(self, budget: Budget) -> Iterator[Sizes]:
        """Yield one item or two whose frames, or windows, are all segments of a budget, the richest first."""
        unit, segments = self._spec.row_multiple, budget.segments
        if self._spec.usage.windows is not None:
            yield [(1, segments * (self._spec.usage.windows.side * self._spec.layout.merge) ** 2)]
        elif self._spec.layout.has_frames and "frame" in self._spec.usage.kinds:
            half = segments // 2
            yield from ([(half, rows), (segments - half, unit)] for rows in (2 * unit, unit) if half)
            yield [(segments, unit)]

    def longest(self, budget: Budget) -> Iterator[Layout]:
        """Yield one item as long as a budget holds."""
        layout = self._layout([(1, budget.max_seqlen // self._spec.row_multiple * self._spec.row_multiple)])
        if self._fits(layout, budget):
            yield layout

    def _varied(self, sizes: Sizes) -> Iterator[Layout]:
        """Yield items with several values in each column, then with those of the call, then without any."""
        if self._spec.layout.columns:
            yield from (self._layout(sizes, values) for values in self._values)
        yield self._layout(sizes)

    def _layout(self, sizes: Sizes, values: Callable[[int], Sequence[int]] | None = None) -> Layout:
        """Return items of these sizes, every other one turned on its side; without values, columns hold their defaults.

        They are longer where items of a few rows have no entries in some output, and, but for the first, uneven where
        these are counted: functions that differ may agree on round numbers.
        """
        scale = max(1, self._spec.shortest / ENTERED)
        unit, items = self._spec.row_multiple, []
        for at, (frames, rows) in enumerate(sizes):
            if self._spec.counts_rows and at:
                rows = max(1, rows - at % 4)
            own_rows = max(1, round(rows * scale / unit), self._spec.smallest // unit) * unit
            _, h, w, *_ = sample_item(self._spec.layout, own_rows, self._spec.layout.merge)
            own = (values or self._plain)(at)
            begins = [int(at % 3 != 2)] * self._spec.layout.grouped  # two of three items begin a group
            sides = (w, h) if self._spec.layout.has_sides and at % 2 else (h, w)
            items.append((frames, *sides, *own, *begins))
        return self._spec.layout.layout(items)

    def _exact_layout(self, sizes: Sizes) -> Layout:
        """Return items of exactly these sizes."""
        side = (
            self._spec.layout.merge
            if self._spec.usage.windows is None
            else self._spec.layout.merge * self._spec.usage.windows.side
        )
        sides = [
            sample_item(self._spec.layout, rows, self._spec.layout.merge if rows % side**2 else side)
            for _, rows in sizes
        ]
        return self._spec.layout.layout((frames, *own[1:]) for (frames, _), own in zip(sizes, sides, strict=True))

    def _fits(self, layout: Layout, budget: Budget) -> bool:
        return min(layout.rows) >= self._spec.min_rows and budget.holds(*self._spec.usage.of(layout))
