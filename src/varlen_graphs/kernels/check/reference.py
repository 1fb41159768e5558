"""Validation of items that the host has not seen, in plain torch operations: the specification."""

from ctypes import c_int64

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import item_rows

SIZE, MERGE, ROWS, RATIO, SEGMENTS, LONGEST = range(1, 7)
"""Codes of faults: a size that is too small, a side that the merge size does not divide, a total of rows other than the
number of rows in the call, an item that an output ratio cuts, too many segments, a segment that is too long. If there
are several, the first in this order is reported.
"""


def check_items(
    header: Tensor, table: Tensor, padding: Tensor, status: Tensor, nan_mask: Tensor, least: int, merge: int,
    multiple: int, segments: int, longest: int, frames: bool, whole: bool, window: int,
) -> None:  # fmt: skip
    """Validate the items of a call in place; turn the rest of the table, or all of an invalid one, into padding.

    An item without rows has no frames, height and width, whatever it says, and so no segments. Does nothing if the host
    has seen the items. Row counts saturate at `rows + 1`, so that no product overflows.

    Args:
        header: int64 `[5]`: number of the call; number of its items; number of its rows; 1 if the host has not seen the
            items; and the address of their sizes, int64 `[items, 3]` on the device of the table, or 0 if they are in
            the table already. Whoever writes the address vouches for the memory there.
        table: An item table. Changed in place.
        padding: A padding item, int64 `[3 + columns]`.
        status: int64 `[6]`. Set to `(call, code, item, got, expected, count)` if the table is invalid, with item -1 for
            a fault of the whole table, and `count` one more than before; unchanged otherwise.
        nan_mask: float32 `[]`. Set to NaN if the table is invalid, and to -0.0 otherwise: adding -0.0 changes no
            number.
        least: Smallest size, 0 or 1.
        merge: Divisor of `h` and `w` of each item.
        multiple: Divisor of the rows of each item.
        segments: Maximum number of segments.
        longest: Maximum rows of a segment.
        frames: True if frames are segments.
        whole: True if items are segments.
        window: Rows per side of the windows that are segments; 0 if windows are not segments.

    Raises:
        ValueError: There is an address, and the table is on a GPU.
    """
    call, items, rows, unseen, address = header.tolist()
    if address and table.is_cuda:
        raise ValueError("the reference reads memory of the host: expected the table there")
    nan_mask.fill_(-0.0)
    if not unseen:
        return
    if address:
        sizes = (c_int64 * (3 * items)).from_address(address)
        table[:items, :3] = torch.tensor([*sizes], device=table.device).view(items, 3)
    table[items:] = padding
    found = _first_fault(table[:items].tolist(), rows, least, merge, multiple, segments, longest, frames, whole, window)
    if found:
        table[:] = padding
        nan_mask.fill_(torch.nan)
        status.copy_(torch.tensor([call, *found, int(status[5]) + 1], device=status.device))
        return
    table[:items, :3] *= (item_rows(table[:items]) > 0)[:, None]


def _first_fault(
    items: list[list[int]], rows: int, least: int, merge: int, multiple: int, segments: int, longest: int, frames: bool,
    whole: bool, window: int,
) -> tuple[int, int, int, int] | None:  # fmt: skip
    most = rows + 1
    sizes = [[min(max(size, 0), most) for size in item[:3]] for item in items]
    areas = [min(h * w, most) for _, h, w in sizes]
    counted = [min(t * area, most) for (t, _, _), area in zip(sizes, areas, strict=True)]
    for index, (t, h, w, *_) in enumerate(items):
        if min(t, h, w) < least:
            return SIZE, index, min(t, h, w), least
    for index, (_, h, w, *_) in enumerate(items):
        if h % merge or w % merge:
            return MERGE, index, h if h % merge else w, merge
    if sum(counted) != rows:
        return ROWS, -1, sum(counted), rows
    for index, count in enumerate(counted):
        if count % multiple:
            return RATIO, index, count, multiple
    sizes = [size if count else [0, 0, 0] for size, count in zip(sizes, counted, strict=True)]
    areas = [area if count else 0 for area, count in zip(areas, counted, strict=True)]
    counts = [t for t, _, _ in sizes] if frames else [0]
    if window:
        counts = [min(t * min(-(-h // window) * -(-w // window), most), most) for t, h, w in sizes]
    if sum(counts) > segments:
        return SEGMENTS, -1, sum(counts), segments
    for index, ((_, h, w), area, count) in enumerate(zip(sizes, areas, counted, strict=True)):
        length = count if whole else area if frames else min(h, window) * min(w, window)
        if length > longest:
            return LONGEST, index, length, longest
    return None
