"""Kinds of segments: spans of rows that attend to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varlen_graphs.checks.fields import check_at_least


@dataclass(frozen=True)
class Windows:
    """Square windows that tile each frame from its top left corner.

    Windows at the right and bottom edges may be smaller. Windows are a kind of segment and also an order of rows: a
    frame then lists its windows row by row, each window its merged tokens row by row, and the rows of a merged token
    adjoin. `WindowIndex` produces this order.

    Attributes:
        side: Side in merged tokens, that is, `side * merge` rows with the merge size of the layout.

    Raises:
        SpecError: `side` is not an integer of at least 1.
    """

    side: int

    def __post_init__(self) -> None:
        check_at_least(self, 1, "side")


Per = Literal["frame", "item", "clip", "group"] | Windows
"""Kind of segment: a frame (`h * w` rows), all rows of an item (a clip is an item with frames), all rows of a group of
items, or a window."""


def segments_of(item: Sequence[int], per: Per, merge: int = 1) -> tuple[int, int]:
    """Return the number of segments of an item `(t, h, w, *columns)`, and the rows of the longest."""
    t, h, w = item[:3]
    if isinstance(per, Windows):
        side = per.side * merge
        return t * -(-h // side) * -(-w // side), min(h, side) * min(w, side)
    return (t, h * w) if per == "frame" else (1, t * h * w)
