"""What rows attend to each other: kinds of segments, and how many an item has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varlen_graphs.errors import SpecError


@dataclass(frozen=True)
class Windows:
    """Squares that each frame is cut into, from its top left corner; at the right and the bottom edge they may be less.

    As a kind of segment, and as an order of rows: window by window in a frame (row by row of windows), in each of them
    merged token by merged token, row by row. The rows of a merged token adjoin. `WindowIndex` brings them there.

    Attributes:
        side: Merged tokens a side, so `side * merge` rows by the merge size of the layout.
    """

    side: int

    def __post_init__(self) -> None:
        if self.side < 1:
            raise SpecError(f"Windows(side={self.side}): expected an integer of at least 1, in merged tokens")


Per = Literal["frame", "item", "clip", "group"] | Windows
"""What one segment is: a frame (`h * w` rows), all rows of an item (a clip is an item that has frames), those of a
group of items, or a window."""


def segments_of(item: Sequence[int], per: Per, merge: int = 1) -> tuple[int, int]:
    """How many segments an item has, and how many rows the longest of them has.

    Args:
        item: `(t, h, w, *columns)`.
        per: What a segment is.
        merge: The merge size of the layout.
    """
    t, h, w = item[:3]
    if isinstance(per, Windows):
        side = per.side * merge
        return t * -(-h // side) * -(-w // side), min(h, side) * min(w, side)
    return (t, h * w) if per == "frame" else (1, t * h * w)
