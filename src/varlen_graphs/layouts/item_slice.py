"""Slices of the items of a call, and of their rows."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from varlen_graphs.layouts.items import Layout


class ItemSlice(NamedTuple):
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
    def of(cls, layout: Layout) -> "ItemSlice":
        """Return the slice of all items of a call or a replay."""
        items = layout.items
        groups = layout.group_of[-1] + 1 if layout.grouped else len(items)
        return cls(0, layout.total, 0, len(items), layout.length, items, 0, groups)


def slices_of(layout: Layout, items: Sequence[int], length: int) -> list[tuple[ItemSlice, ItemSlice]]:
    """Return the slices of some items in a call, and in one of these alone, in as few pairs as possible.

    Args:
        layout: The items of the call.
        items: Their indices, in any order.
        length: In a padded batch, the rows of each item that take part.
    """
    slices = []
    starts = list(accumulate(layout.rows, initial=0))
    own = tuple([layout.items[i] for i in items])
    row = item = group = 0
    while item < len(items):
        first = items[item]
        count = 1
        while item + count < len(items) and items[item + count] == first + count:
            count += 1
        rows = starts[first + count] - starts[first]
        first_group = layout.group_of[first]
        groups = layout.group_of[first + count - 1] + 1 - first_group
        there = ItemSlice(starts[first], rows, first, count, length, layout.items, first_group, groups)
        slices.append((there, ItemSlice(row, rows, item, count, length, own, group, groups)))
        row += rows
        item += count
        group += groups
    return slices
