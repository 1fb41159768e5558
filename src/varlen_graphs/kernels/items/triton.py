"""Lookup of the item of a row, as functions for kernels.

Each program finds the items of its rows by itself: it reads the whole table, a few KiB that stay in the cache, and
compares all items with all of its rows. That costs less than a launch. These kernels run programs of one warp over few
rows, so that sums over items need no barrier.

Whatever the table holds, positions are at least 0 and sizes at least 1.
"""

import torch
import triton
import triton.language as tl

ITEMS = tl.constexpr(128)
"""Items compared with rows at a time."""

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""Compile options. Without fused multiply-add, kernels round as the operations of the reference do."""

LAST = tl.constexpr(2**31 - 1)
"""More rows than any budget has: larger counts saturate here, so that 32 bits are enough."""


@triton.jit
def read_items(values, item_stride, column_stride, items, first):
    """Load the sizes `t`, `h`, `w` of `ITEMS` items from `first` on, int64 `[ITEMS]` each; 0 past the end."""
    item = first + tl.arange(0, ITEMS)
    there = item < items
    sizes = values + item * item_stride
    t = tl.load(sizes, there, 0)
    h = tl.load(sizes + column_stride, there, 0)
    w = tl.load(sizes + 2 * column_stride, there, 0)
    return t, h, w


@triton.jit
def to_int32(x):
    """Convert a count of rows from int64 to int32, saturating."""
    return tl.minimum(x, LAST).to(tl.int32)


@triton.jit
def find(row, values, item_stride, column_stride, items):
    """Return index in the item, height and width of the frame of each row, int32 as `row`; 0 or less in padding."""
    start = tl.zeros_like(row)
    height = tl.zeros_like(row)
    width = tl.zeros_like(row)
    total = tl.full([], 0, tl.int64)
    for first in range(0, items, ITEMS):
        t, h, w = read_items(values, item_stride, column_stride, items, first)
        counts = t * h * w
        ends = total + tl.cumsum(counts, 0)
        starts = to_int32(ends - counts)[None, :]
        own = (starts <= row[:, None]) & (row[:, None] < to_int32(ends)[None, :])
        start += tl.sum(tl.where(own, starts, 0), 1)
        height += tl.sum(tl.where(own, to_int32(h)[None, :], 0), 1)
        width += tl.sum(tl.where(own, to_int32(w)[None, :], 0), 1)
        total += tl.sum(counts, 0)
    return tl.where(height > 0, tl.maximum(row - start, 0), 0), height, width


@triton.jit
def locate(row, values, item_stride, column_stride, items):
    """Return the same as `find`, with sizes of at least 1, also in padding."""
    within, height, width = find(row, values, item_stride, column_stride, items)
    return within, tl.maximum(height, 1), tl.maximum(width, 1)


@triton.jit
def grid_position(within, height, width, MERGE: tl.constexpr, SIDE: tl.constexpr = 0):
    """Return frame and position in it, `t`, `h`, `w`, int32 as `within`, of the row at index `within` of its item.

    If `SIDE` is not 0, the blocks of a frame are ordered in windows of `SIDE * SIDE` blocks.
    """
    frame = to_int32(height.to(tl.int64) * width)
    t = within // frame
    place = within - t * frame
    across = tl.maximum(width // MERGE, 1)
    block = place // (MERGE * MERGE)
    inner = place - block * (MERGE * MERGE)
    if SIDE:
        top = block // (across * SIDE) * SIDE
        block -= top * across
        tall = tl.minimum(tl.maximum(height // MERGE - top, 1), SIDE)
        left = block // (tall * SIDE) * SIDE
        block -= left * tall
        wide = tl.minimum(tl.maximum(across - left, 1), SIDE)
        y = top + block // wide
        x = left + block % wide
    else:
        y = block // across
        x = block - y * across
    return t, y * MERGE + inner // MERGE, x * MERGE + inner % MERGE


@triton.jit
def coordinate(AXES: tl.constexpr, AXIS: tl.constexpr, t, h, w, row):
    """Return the coordinate of one of several axes."""
    if AXES[AXIS] == "t":
        return t
    elif AXES[AXIS] == "h":
        return h
    elif AXES[AXIS] == "w":
        return w
    else:
        return row


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))
