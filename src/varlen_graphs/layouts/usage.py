"""Capacity that items use of a budget."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from varlen_graphs.budgets.budget import ROWS_PER_ITEM
from varlen_graphs.errors import counted
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.segments import Per, Windows, segments_of


class Usage(NamedTuple):
    """Capacity that items use together."""

    rows: int = 0
    items: int = 0
    segments: int = 0
    longest: int = 0

    def __str__(self) -> str:
        own = f" in {counted(self.segments, 'segment')} of at most {counted(self.longest, 'row')}" * bool(self.segments)
        return f"{counted(self.items, 'item')} of {counted(self.rows, 'row')}{own}"

    def add(self, other: "Usage") -> "Usage":
        """Return the usage of the items of both."""
        rows, items, segments, longest = other
        return Usage(self.rows + rows, self.items + items, self.segments + segments, max(self.longest, longest))


class UsageMeter:
    """Computes the capacity that items use, by the kinds of segments of a declaration.

    Args:
        layout: The argument that describes the items.
        kinds: The kinds of segments.

    Attributes:
        layout, kinds: As given.
    """

    def __init__(self, layout: LayoutArgument, kinds: set[Per]) -> None:
        self.layout = layout
        self.kinds = kinds

    def of_items(self, *items: Sequence[int]) -> Usage:
        """Return the usage of an item, or of a group of items that stay together."""
        rows = sum([item[0] * item[1] * item[2] for item in items])
        kinds = [[segments_of(item, per, self.layout.merge) for per in self.kinds] for item in items]
        segments = sum([max((count for count, _ in own), default=0) for own in kinds])
        longest = max((length for own in kinds for _, length in own), default=0)
        return Usage(rows, len(items), segments, rows if "group" in self.kinds else longest)

    def of(self, layout: Layout) -> Usage:
        """Return the usage of all items together."""
        frames, whole, _ = self.by_kind
        segments = longest = 0
        if whole:
            segments = len(layout.items)  # a group takes as many as it has items
            longest = max(layout.group_rows) if "group" in self.kinds else layout.longest
        if frames:  # an item has no fewer segments than one, and no frame is longer than its item
            segments = frame = 0
            for item in layout.items:
                segments += item[0]
                frame = max(frame, item[1] * item[2])
            longest = longest or frame
        if self.windows:  # a frame has no fewer windows than one, and none is longer than it
            cut = [segments_of(item, self.windows, self.layout.merge) for item in layout.items]
            segments = sum([count for count, _ in cut])
            longest = longest or max([length for _, length in cut])
        return Usage(layout.total, len(layout.items), segments, longest)

    def squares(self, layout: Layout) -> int:
        """Return the sum of squared segment lengths, which the cost of attention follows, for the longest kind."""
        frames, whole, window = self.by_kind
        if whole:
            lengths = layout.rows if "item" in self.kinds or not layout.grouped else layout.group_rows
            return sum([rows * rows for rows in lengths])
        if frames:
            return sum([item[0] * (item[1] * item[2]) ** 2 for item in layout.items])
        return layout.total * window**2  # as if no window were cut by an edge

    @cached_property
    def by_kind(self) -> tuple[bool, bool, int]:
        """True if frames are segments, True if items are, and the side of windows in rows if they are, else 0."""
        window = self.windows.side * self.layout.merge if self.windows else 0
        return "frame" in self.kinds, bool(self.kinds & {"item", "clip", "group"}), window

    @property
    def rows_per_segment(self) -> int:
        """Rows for each of which a budget has a segment, if its number of segments is not given.

        A quarter of a window: those at the right and bottom edges of frames may be smaller, and hardly ever are on
        average, except in strips.
        """
        window = self.by_kind[2]
        return min(ROWS_PER_ITEM, max(1, window**2 // 4)) if window else ROWS_PER_ITEM

    @cached_property
    def windows(self) -> Windows | None:
        """The windows that are segments, if any."""
        return next((per for per in self.kinds if isinstance(per, Windows)), None)

    def most(self, rows: int, items: int, min_segment_rows: int) -> Usage:
        """Return the largest usage of `items` items with `rows` rows, in segments of `min_segment_rows` on average.

        All rows may be those of one item, because others may have none.
        """
        frames, whole, window = self.by_kind
        segments = longest = 0
        if self.kinds:
            cut = frames or window
            segments = rows // max(min_segment_rows, self.layout.row_multiple) if cut else items
            longest = rows
        if not (frames or whole):
            longest = min(longest, window**2)
        return Usage(rows, items, segments, longest)
