"""What is checked of an item table that the host has not seen, and what happens where it is wrong."""

import torch
from torch import Tensor

SIZE, MERGE, ROWS, RATIO, SEGMENTS, LONGEST = range(1, 7)
"""What can be wrong: a size below 1, a side that the merge size does not divide, another number of rows in all than
came, an item that an output ratio cuts, too many segments, a segment that is too long. The first in this order is told.
"""


def check_items(
    header: Tensor,
    table: Tensor,
    padding: Tensor,
    status: Tensor,
    veil: Tensor,
    merge: int,
    multiple: int,
    segments: int,
    longest: int,
    frames: bool,
    whole: bool,
    window: int,
) -> None:
    """Check the first items of a table; the rest becomes padding, and all of it where they are wrong.

    Where the host has seen them there is nothing to do. Numbers of rows are counted up to `rows + 1`, so that no
    product overflows.

    Args:
        header: int64 `[4]`: the number of this call, how many items and rows came, and whether the host has not seen
            the items.
        table: int64 `[items, 3 + columns]`, of `(t, h, w, *columns)`. Changed in place.
        padding: What an item of padding is, int64 `[3 + columns]`.
        status: int64 `[5]`. Where something is wrong it becomes `(call, code, item, came, expected)`, with -1 for the
            item where it is about all of them; otherwise it is left as it is.
        veil: float32 `[]`. Becomes NaN where something is wrong and -0.0 otherwise: adding that changes no number.
        merge: What divides `h` and `w` of each item.
        multiple: What divides the rows of each item.
        segments: The most segments there may be.
        longest: The most rows that a segment may have.
        frames: Whether frames are segments.
        whole: Whether items are segments.
        window: How many rows a side the windows have that are segments; 0 if there are none.
    """
    call, items, rows, unseen = header.tolist()
    veil.fill_(-0.0)
    if not unseen:
        return
    table[items:] = padding
    found = _first_fault(table[:items].tolist(), rows, merge, multiple, segments, longest, frames, whole, window)
    if found:
        table[:] = padding
        veil.fill_(torch.nan)
        status.copy_(torch.tensor([call, *found]))


def _first_fault(
    items: list[list[int]],
    rows: int,
    merge: int,
    multiple: int,
    segments: int,
    longest: int,
    frames: bool,
    whole: bool,
    window: int,
) -> tuple[int, int, int, int] | None:
    most = rows + 1
    sizes = [[min(max(size, 0), most) for size in item[:3]] for item in items]
    areas = [min(h * w, most) for _, h, w in sizes]
    item_rows = [min(t * area, most) for (t, _, _), area in zip(sizes, areas, strict=True)]
    for index, (t, h, w, *_) in enumerate(items):
        if min(t, h, w) < 1:
            return SIZE, index, min(t, h, w), 1
    for index, (_, h, w, *_) in enumerate(items):
        if h % merge or w % merge:
            return MERGE, index, h if h % merge else w, merge
    if sum(item_rows) != rows:
        return ROWS, -1, sum(item_rows), rows
    for index, count in enumerate(item_rows):
        if count % multiple:
            return RATIO, index, count, multiple
    counts = [t for t, _, _ in sizes] if frames else [0]
    if window:
        counts = [min(t * min(-(-h // window) * -(-w // window), most), most) for t, h, w in sizes]
    if sum(counts) > segments:
        return SEGMENTS, -1, sum(counts), segments
    for index, ((_, h, w), area, count) in enumerate(zip(sizes, areas, item_rows, strict=True)):
        length = count if whole else area if frames else min(h, window) * min(w, window)
        if length > longest:
            return LONGEST, index, length, longest
    return None
