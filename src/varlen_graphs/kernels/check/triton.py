"""Validation of items as one Triton program over all items."""

import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.check import reference
from varlen_graphs.kernels.launch import launch

SIZE, MERGE, ROWS = tl.constexpr(reference.SIZE), tl.constexpr(reference.MERGE), tl.constexpr(reference.ROWS)
RATIO, SEGMENTS = tl.constexpr(reference.RATIO), tl.constexpr(reference.SEGMENTS)
LONGEST = tl.constexpr(reference.LONGEST)


def check_items(
    header: Tensor, table: Tensor, padding: Tensor, status: Tensor, nan_mask: Tensor, least: int, merge: int,
    multiple: int, segments: int, longest: int, frames: bool, whole: bool, window: int,
) -> None:  # fmt: skip
    """Run `reference.check_items` in one launch. The table must be contiguous."""
    capacity, width = table.shape
    launch(_check_items, (1,),
        header, table, padding, status, nan_mask, least, merge, multiple, segments, longest, capacity,
        FRAMES=frames, WHOLE=whole, WINDOW=window, WIDTH=width, BLOCK=triton.next_power_of_2(capacity),
    )  # fmt: skip


@triton.jit
def _first(bad, i_item, BLOCK: tl.constexpr):
    """Return the first item where `bad` holds, or BLOCK."""
    return tl.min(tl.where(bad, i_item, BLOCK), axis=0)


@triton.jit
def _at(value, i_item, index):
    """Return the value of one item."""
    return tl.sum(tl.where(i_item == index, value, 0), axis=0)


@triton.jit
def _size(p_item, address, at: tl.constexpr, i_item, items, other: tl.constexpr):
    """Return a size of each item: from the table, or from the address, and then into the table, too."""
    elsewhere = tl.where(address != 0, items, 0)
    m_there = i_item < elsewhere
    there = tl.load(address.to(tl.pointer_type(tl.int64)) + 3 * i_item + at, mask=m_there, other=other)
    tl.store(p_item + at, there, mask=m_there)
    here = tl.load(p_item + at, mask=(i_item < items) & (i_item >= elsewhere), other=other)
    return tl.where(m_there, there, here)


@triton.jit(do_not_specialize=["least", "merge", "multiple", "segments", "longest", "capacity"])
def _check_items(
    p_header, p_table, p_padding, p_status, p_nan_mask, least, merge, multiple, segments, longest, capacity,
    FRAMES: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Stored by its bits: a constant of -0.0 loses its sign in Triton 3.6.
    tl.store(p_nan_mask, tl.full([], -(2**31), tl.int32).to(tl.float32, bitcast=True))
    if tl.load(p_header + 3) != 0:
        _check_unseen(
            p_header, p_table, p_padding, p_status, p_nan_mask, least, merge, multiple, segments, longest, capacity,
            FRAMES, WHOLE, WINDOW, WIDTH, BLOCK,
        )  # fmt: skip


@triton.jit
def _check_unseen(
    p_header, p_table, p_padding, p_status, p_nan_mask, least, merge, multiple, segments, longest, capacity,
    FRAMES: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    items = tl.load(p_header + 1)
    rows = tl.load(p_header + 2)
    address = tl.load(p_header + 4)
    i_item = tl.arange(0, BLOCK)
    m_item = i_item < items
    o_item = i_item * WIDTH
    t = _size(p_table + o_item, address, 0, i_item, items, 1)  # [BLOCK]
    h = _size(p_table + o_item, address, 1, i_item, items, 0)
    w = _size(p_table + o_item, address, 2, i_item, items, 0)

    most = rows + 1
    b_t = tl.minimum(tl.maximum(t, 0), most)
    b_h = tl.minimum(tl.maximum(h, 0), most)
    b_w = tl.minimum(tl.maximum(w, 0), most)
    b_area = tl.minimum(b_h * b_w, most)
    b_rows = tl.where(m_item, tl.minimum(b_t * b_area, most), 0)
    total = tl.sum(b_rows, axis=0)
    # An item without rows has no frames, height and width, whatever it says.
    b_t = tl.where(b_rows > 0, b_t, 0)
    b_h = tl.where(b_rows > 0, b_h, 0)
    b_w = tl.where(b_rows > 0, b_w, 0)
    b_area = tl.where(b_rows > 0, b_area, 0)
    m_empty = m_item & (b_rows == 0)
    for i_size in tl.static_range(3):
        tl.store(p_table + o_item + i_size, tl.zeros_like(t), mask=m_empty)
    smallest = tl.minimum(t, tl.minimum(h, w))
    b_count = b_rows * 0
    b_longest = b_rows * 0
    if FRAMES:
        b_count = b_t
        b_longest = b_area
    if WINDOW:
        b_count = tl.minimum(b_t * tl.minimum(tl.cdiv(b_h, WINDOW) * tl.cdiv(b_w, WINDOW), most), most)
        if not FRAMES:
            b_longest = tl.minimum(b_h, WINDOW) * tl.minimum(b_w, WINDOW)
    count = tl.sum(tl.where(m_item, b_count, 0), axis=0)
    if WHOLE:
        b_longest = b_rows

    small = _first(m_item & (smallest < least), i_item, BLOCK)
    uneven = _first(m_item & ((h % merge != 0) | (w % merge != 0)), i_item, BLOCK)
    cut = _first(m_item & (b_rows % multiple != 0), i_item, BLOCK)
    long = _first(m_item & (b_longest > longest), i_item, BLOCK)

    # Only the first fault is reported, so it is assigned last.
    zero = total * 0
    code, item, came, expected = zero, zero - 1, zero, zero
    if long < BLOCK:
        code, item, came, expected = zero + LONGEST, zero + long, _at(b_longest, i_item, long), zero + longest
    if count > segments:
        code, item, came, expected = zero + SEGMENTS, zero - 1, count, zero + segments
    if cut < BLOCK:
        code, item, came, expected = zero + RATIO, zero + cut, _at(b_rows, i_item, cut), zero + multiple
    if total != rows:
        code, item, came, expected = zero + ROWS, zero - 1, total, zero + rows
    if uneven < BLOCK:
        b_side = tl.where(h % merge != 0, h, w)
        code, item, came, expected = zero + MERGE, zero + uneven, _at(b_side, i_item, uneven), zero + merge
    if small < BLOCK:
        code, item, came, expected = zero + SIZE, zero + small, _at(smallest, i_item, small), zero + least

    wrong = code != 0
    m_padding = (i_item < capacity) & (i_item >= tl.where(wrong, 0, items))
    for i_column in tl.static_range(WIDTH):
        tl.store(p_table + o_item + i_column, tl.load(p_padding + i_column), mask=m_padding)
    if wrong:
        tl.store(p_nan_mask, float("nan"))
        tl.store(p_status, tl.load(p_header))
        tl.store(p_status + 1, code)
        tl.store(p_status + 2, item)
        tl.store(p_status + 3, came)
        tl.store(p_status + 4, expected)
        tl.store(p_status + 5, tl.load(p_status + 5) + 1)
