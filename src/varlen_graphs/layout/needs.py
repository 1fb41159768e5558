"""What items need of a budget."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.segments import Per, Windows, segments_of


class Demand(NamedTuple):
    """What one item needs of a budget, or some that stay together."""

    rows: int
    segments: int
    longest: int
    items: int = 1


class Load(NamedTuple):
    """What some items together need of a budget."""

    rows: int = 0
    items: int = 0
    segments: int = 0
    longest: int = 0

    def add(self, demand: Demand) -> "Load":
        """With this as well."""
        return Load(
            self.rows + demand.rows,
            self.items + demand.items,
            self.segments + demand.segments,
            max(self.longest, demand.longest),
        )


class Needs:
    """Counts what items need of a budget, by the kinds of segments that a declaration uses.

    Args:
        layout: What describes the items.
        kinds: The kinds of segments.

    Attributes:
        kinds: As given.
    """

    def __init__(self, layout: LayoutArgument, kinds: set[Per]) -> None:
        self._layout = layout
        self.kinds = kinds

    def demand(self, *items: Sequence[int]) -> Demand:
        """What an item, or a group of them, needs of a budget, by the segments that are declared."""
        rows = sum([item[0] * item[1] * item[2] for item in items])
        kinds = [[segments_of(item, per, self._layout.merge) for per in self.kinds] for item in items]
        segments = sum([max((count for count, _ in own), default=0) for own in kinds])
        longest = max((length for own in kinds for _, length in own), default=0)
        return Demand(rows, segments, rows if "group" in self.kinds else longest, len(items))

    def load(self, layout: Layout) -> Load:
        """What all items together need of a budget: the sum of their demands."""
        frames, whole, _ = self.by_kind
        segments = longest = 0
        if whole:
            segments = len(layout)  # a group takes as many as it has items
            longest = max(layout.group_rows if "group" in self.kinds else layout.rows)
        if frames:  # an item has no fewer segments than one, and no frame is longer than its item
            segments = sum([item[0] for item in layout.items])
            longest = longest or max([item[1] * item[2] for item in layout.items])
        if self.windows:  # a frame has no fewer windows than one, and none is longer than it
            cut = [segments_of(item, self.windows, self._layout.merge) for item in layout.items]
            segments = sum([count for count, _ in cut])
            longest = longest or max([length for _, length in cut])
        return Load(layout.total, len(layout), segments, longest)

    def squares(self, layout: Layout) -> int:
        """The sum of squared segment lengths, which attention costs follow; of the longest kind there is."""
        frames, whole, window = self.by_kind
        if whole:
            lengths = layout.rows if "item" in self.kinds or not layout.grouped else layout.group_rows
            return sum([rows * rows for rows in lengths])
        if frames:
            return sum([item[0] * (item[1] * item[2]) ** 2 for item in layout.items])
        return sum([item[0] * item[1] * item[2] for item in layout.items]) * window**2  # as if none were cut by an edge

    @cached_property
    def by_kind(self) -> tuple[bool, bool, int]:
        """Whether frames are segments, whether items are, and how many rows a side windows have that are; or 0."""
        window = self.windows.side * self._layout.merge if self.windows else 0
        return "frame" in self.kinds, bool(self.kinds & {"item", "clip", "group"}), window

    @cached_property
    def windows(self) -> Windows | None:
        """The windows that are segments, if some are."""
        return next((per for per in self.kinds if isinstance(per, Windows)), None)

    def most(self, rows: int, items: int, min_segment_rows: int) -> Load:
        """The most that so many items of together so many rows can need of a budget, whatever they are.

        Args:
            rows: Rows of all items.
            items: Items.
            min_segment_rows: What segments are promised to have on average, at least.
        """
        frames, whole, window = self.by_kind
        segments = longest = 0
        if self.kinds:
            cut = frames or window
            segments = rows // max(min_segment_rows, self._layout.row_multiple) if cut else items
            longest = rows - (items - 1) * self._layout.row_multiple
        if not (frames or whole):
            longest = min(longest, window**2)
        return Load(rows, items, segments, longest)
