"""Adjoining items, and the place of their rows."""

from typing import NamedTuple

from varlen_graphs.layout.items import Layout


class Span(NamedTuple):
    """Items that adjoin in a call and in a replay, and their place in one of the two.

    Attributes:
        row: First row.
        rows: Number of rows.
        item: First item.
        items: Number of items.
        length: In a padded batch, the rows of each item that take part; 0 for packed rows.
        all_items: All items of the call or the replay; empty if only the GPU has seen them.
        group: First group.
        groups: Number of groups; 0 if only the GPU has seen the items.
    """

    row: int
    rows: int
    item: int
    items: int
    length: int = 0
    all_items: tuple[tuple[int, ...], ...] = ()
    group: int = 0
    groups: int = 0

    @classmethod
    def of(cls, layout: Layout) -> "Span":
        """Return the span of all items of a call or a replay."""
        items = layout.items
        groups = layout.group_of[-1] + 1 if layout.grouped else len(items)
        return cls(0, layout.total, 0, len(items), layout.length, items, 0, groups)
