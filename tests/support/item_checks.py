"""Tables of items, right and wrong, for the check of items on the GPU."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import strategies
from varlen_graphs.kernels.check import reference

sizes = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))


@st.composite
def cases(draw):
    """A table and what it is checked against, right about as often as wrong."""
    merge = draw(st.integers(1, 2))
    items = draw(strategies.grids(merge=merge))
    for empty in draw(
        st.lists(st.sampled_from([(0, 0, 0), (1, 0, 0), (9, 0, 4), (2**40, 4, 0), (0, 8, 8)]), max_size=2)
    ):
        items.insert(draw(st.integers(0, len(items))), empty)
    rows = sum(t * h * w for t, h, w in items)
    if draw(st.booleans()):
        rows = max(1, rows + draw(st.integers(-1, 1)))
    if draw(st.booleans()):
        at, side = draw(st.integers(0, len(items) - 1)), draw(st.integers(0, 2))
        items[at] = tuple(draw(sizes) if i == side else size for i, size in enumerate(items[at]))
    capacity = len(items) + draw(st.integers(0, 3))
    limits = {
        "least": draw(st.sampled_from([0, 0, 1])), "merge": merge, "multiple": draw(st.sampled_from([1, 1, 4, 8])), "segments": draw(st.integers(1, 12)),
        "longest": draw(st.sampled_from([8, 64, 1000])), "frames": draw(st.booleans()), "whole": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 2, 4])),
    }  # fmt: skip
    return items, capacity, rows, limits


def run_check(check, items, capacity, rows, limits, columns=1, call=7, unseen=1, elsewhere=None):
    """Return the table, the status and the nan_mask; with the sizes of items at an address, if they are on a device."""
    width = 3 + columns
    table = torch.full((capacity, width), 99, dtype=torch.int64)
    table[: len(items)] = torch.tensor([[*item, *[5] * columns] for item in items])
    sizes = torch.tensor(items, device=elsewhere or "cpu")
    if elsewhere:
        table[: len(items), :3] = 99
    padding = torch.tensor([0, 0, 0, *[-1] * columns])
    status, nan_mask = torch.full((6,), -9), torch.tensor(3.0)
    header = torch.tensor([call, len(items), rows, unseen, sizes.data_ptr() if elsewhere else 0])
    check(header, table, padding, status, nan_mask, **limits)
    return table, status, nan_mask


def compare_kernel_and_reference(device):
    """Compare the kernel with the reference, bit for bit."""
    from varlen_graphs.kernels.check import triton

    def on_device(*tensors, **limits):
        moved = [x.to(device) for x in tensors]
        triton.check_items(*moved, **limits)
        for x, y in zip(tensors, moved, strict=True):
            x.copy_(y)

    @settings(max_examples=30, deadline=None, database=None)
    @given(cases(), st.integers(0, 2), st.integers(0, 1), st.booleans())
    def compare(case, columns, unseen, elsewhere):
        options = {"columns": columns, "unseen": unseen}
        there, here = (device, "cpu") if elsewhere else (None, None)
        for got, expected in zip(
            run_check(on_device, *case, **options, elsewhere=there),
            run_check(reference.check_items, *case, **options, elsewhere=here),
            strict=True,
        ):
            assert torch.equal(got.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9)), case
            assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan()), case

    compare()
