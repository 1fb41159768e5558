"""Adjoining items, and the place of their rows."""

from typing import NamedTuple

from varlen_graphs.layout.items import Layout


class Span(NamedTuple):
    """Items that adjoin in a call and in a replay: first row, item and group in one of the two, and their numbers."""

    row: int
    rows: int
    item: int
    items: int
    length: int = 0  # in a padded batch, the rows of each item that take part
    all_items: tuple[tuple[int, ...], ...] = ()  # of the call or the replay; empty if only the GPU has seen them
    group: int = 0
    groups: int = 0  # 0 if only the GPU has seen the items

    @classmethod
    def of(cls, layout: Layout) -> "Span":
        """Return the span of all items of a call or a replay."""
        items = layout.items
        groups = layout.group_of[-1] + 1 if layout.grouped else len(items)
        return cls(0, layout.total, 0, len(items), layout.length, items, 0, groups)
