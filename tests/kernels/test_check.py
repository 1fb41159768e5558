"""The check of layouts that only the GPU has seen: the reference against the host's own checks, the kernel against it."""

import os
import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import strategies
from varlen_graphs.kernels.check import reference
from varlen_graphs.kernels.check.op import check_items
from varlen_graphs.kernels.check.reference import LONGEST, MERGE, RATIO, ROWS, SEGMENTS, SIZE
from varlen_graphs.layout.segments import segments_of

sizes = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))


@st.composite
def cases(draw):
    """A table and what it is checked against, right about as often as wrong."""
    merge = draw(st.integers(1, 2))
    items = draw(strategies.grids(merge=merge))
    rows = sum(t * h * w for t, h, w in items)
    if draw(st.booleans()):
        rows = max(1, rows + draw(st.integers(-1, 1)))
    if draw(st.booleans()):
        at, side = draw(st.integers(0, len(items) - 1)), draw(st.integers(0, 2))
        items[at] = tuple(draw(sizes) if i == side else size for i, size in enumerate(items[at]))
    capacity = len(items) + draw(st.integers(0, 3))
    limits = {
        "merge": merge, "multiple": draw(st.sampled_from([1, 1, 4, 8])), "segments": draw(st.integers(1, 12)),
        "longest": draw(st.sampled_from([8, 64, 1000])), "frames": draw(st.booleans()), "whole": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 2, 4])),
    }  # fmt: skip
    return items, capacity, rows, limits


def run(check, items, capacity, rows, limits, columns=1, call=7, unseen=1):
    width = 3 + columns
    table = torch.full((capacity, width), 99, dtype=torch.int64)
    table[: len(items)] = torch.tensor([[*item, *[5] * columns] for item in items])
    padding = torch.tensor([0, 0, 0, *[-1] * columns])
    status, veil = torch.full((5,), -9), torch.tensor(3.0)
    header = torch.tensor([call, len(items), rows, unseen])
    check(header, table, padding, status, veil, **limits)
    return table, status, veil


@settings(max_examples=200)
@given(cases())
def test_what_the_host_would_refuse_is_found(case):
    items, capacity, rows, limits = case
    table, status, veil = run(reference.check_items, *case)
    counts = [t * h * w for t, h, w in items]
    kinds = {"item": limits["whole"], "frame": limits["frames"], vg.Windows(limits["window"] or 1): limits["window"]}
    segments = [[segments_of(item, per) for item in items] for per, used in kinds.items() if used]
    too_many = [sum(count for count, _ in found) > limits["segments"] for found in segments[limits["whole"] :]]
    lengths = [length for found in segments for _, length in found]
    faults = {
        SIZE: any(size < 1 for item in items for size in item),
        MERGE: any(side % limits["merge"] for item in items for side in item[1:]),
        ROWS: sum(counts) != rows,
        RATIO: any(count % limits["multiple"] for count in counts),
        SEGMENTS: any(too_many),
        LONGEST: max(lengths, default=0) > limits["longest"],
    }
    first = next((code for code, wrong in faults.items() if wrong), None)
    if first is None:
        assert status.tolist() == [-9] * 5
        assert table.tolist() == [[*item, 5] for item in items] + [[0, 0, 0, -1]] * (capacity - len(items))
        assert torch.signbit(veil)
        assert veil == 0
    else:
        assert status.tolist()[:2] == [7, first]
        assert table.tolist() == [[0, 0, 0, -1]] * capacity
        assert veil.isnan()


@given(cases())
def test_what_the_host_has_seen_is_left_alone(case):
    items, capacity, _, _ = case
    table, status, veil = run(reference.check_items, *case, unseen=0)
    assert status.tolist() == [-9] * 5
    assert table.tolist() == [[*item, 5] for item in items] + [[99] * 4] * (capacity - len(items))
    assert torch.signbit(veil)


def test_the_operator_is_sound_for_the_compiler():
    header, table = torch.tensor([1, 1, 6, 1]), torch.tensor([[1, 2, 3], [9, 9, 9]])
    tensors = header, table, torch.tensor([0, 0, 0]), torch.zeros(5, dtype=torch.int64), torch.tensor(0.0)
    torch.library.opcheck(check_items, (*tensors, 1, 1, 4, 10, True, False, 2))


def test_a_veil_that_hides_nothing_changes_no_bit():
    x = torch.tensor([0.0, -0.0, 1e-45, -3.0, torch.inf, -torch.inf])
    y = x + torch.tensor(-0.0)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    assert (x + torch.tensor(torch.nan)).isnan().all()


def test_the_kernel_equals_the_reference():
    """In Triton's interpreter, which must be chosen before the kernel is imported."""
    code = "import tests.kernels.test_check as t; t.compare_kernel_and_reference('cpu')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def compare_kernel_and_reference(device):
    """Bit for bit, over the same cases."""
    from varlen_graphs.kernels.check import triton

    def on_device(*tensors, **limits):
        moved = [x.to(device) for x in tensors]
        triton.check_items(*moved, **limits)
        for x, y in zip(tensors, moved, strict=True):
            x.copy_(y)

    @settings(max_examples=60, deadline=None, database=None)
    @given(cases(), st.integers(0, 2), st.integers(0, 1))
    def compare(case, columns, unseen):
        options = {"columns": columns, "unseen": unseen}
        for got, expected in zip(
            run(on_device, *case, **options), run(reference.check_items, *case, **options), strict=True
        ):
            assert torch.equal(got.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9)), case
            assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan()), case

    compare()
