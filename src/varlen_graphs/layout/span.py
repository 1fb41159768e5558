"""Adjoining items, and where their rows lie."""

from typing import NamedTuple

from varlen_graphs.layout.items import Layout


class Span(NamedTuple):
    """Adjoining items of a call that also adjoin in a replay, and where they are in one of the two.

    Attributes:
        row: Their first row.
        rows: How many rows they have.
        item: The first of them.
        items: How many they are.
        length: Of a padded batch, how many rows of each take part; 0 where rows are packed.
        all_items: Every item that there is, not only these; empty where the host has not seen them.
        group: The first of their groups.
        groups: How many groups they are; 0 where the host has not seen the items.
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
        """All items of a call or a replay."""
        return cls(0, layout.total, 0, len(layout), layout.length, layout.items, 0, layout.group_of[-1] + 1)
