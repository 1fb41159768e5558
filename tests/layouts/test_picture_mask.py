"""`PictureMask`: padded pictures, told by a mask of their patches."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import varlen_graphs as vg

LAYOUT = vg.layouts.PictureMask("mask", patch=14)

SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


def mask_of(sizes, more=(0, 0), dtype=torch.bool):
    height, width = (max(side) + extra for side, extra in zip(zip(*sizes, strict=True), more, strict=True))
    mask = torch.zeros(len(sizes), height, width, dtype=dtype)
    for one, (h, w) in zip(mask, sizes, strict=True):
        one[:h, :w] = 1
    return mask


@given(SIZES, st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from([torch.bool, torch.int64, torch.uint8]))
def test_the_size_of_a_picture_is_that_of_its_real_patches(sizes, more, dtype):
    assert LAYOUT.parse(mask_of(sizes, more, dtype)) == [(1, h, w) for h, w in sizes]


@given(SIZES, st.data())
def test_any_other_patch_is_refused(sizes, data):
    mask = mask_of(sizes, (1, 1))
    at = data.draw(st.integers(0, len(sizes) - 1))
    h, w = sizes[at]
    row, column = data.draw(st.integers(0, mask.shape[1] - 1)), data.draw(st.integers(0, mask.shape[2] - 1))
    mask[at, row, column] ^= True
    assume((h, w, row, column) not in [(h, 1, h, 0), (1, w, 0, w), (h, 1, h - 1, 0), (1, w, 0, w - 1)])  # longer lines
    with pytest.raises(vg.errors.LayoutError, match=rf"mask\[{at}\] marks other patches than those of a rectangle"):
        LAYOUT.parse(mask)
