"""`check_items`, for layouts that only the GPU has seen: the reference against the host's checks, the kernel against it."""

import torch
from hypothesis import given, settings

import varlen_graphs as vg
from tests.support.item_checks import cases, compare_kernel_and_reference, run_check
from varlen_graphs.kernels.check import reference
from varlen_graphs.kernels.check.op import check_items
from varlen_graphs.kernels.check.reference import LONGEST, MERGE, RATIO, ROWS, SEGMENTS, SIZE
from varlen_graphs.layouts.segments import segments_of


@settings(max_examples=100)
@given(cases())
def test_what_the_host_would_refuse_is_found(case):
    items, capacity, rows, limits = case
    table, status, nan_mask = run_check(reference.check_items, *case)
    counts = [t * h * w for t, h, w in items]
    whole = [item if all(item) else (0, 0, 0) for item in items]  # an item of no rows has no segments
    kinds = {
        "item": limits["whole"],
        "frame": limits["frames"],
        vg.layouts.Windows(limits["window"] or 1): limits["window"],
    }
    segments = [[segments_of(item, per) for item in whole] for per, used in kinds.items() if used]
    too_many = [sum(count for count, _ in found) > limits["segments"] for found in segments[limits["whole"] :]]
    lengths = [length for found in segments for _, length in found]
    faults = {
        SIZE: any(size < limits["least"] for item in items for size in item),
        MERGE: any(side % limits["merge"] for item in items for side in item[1:]),
        ROWS: sum(counts) != rows,
        RATIO: any(count % limits["multiple"] for count in counts),
        SEGMENTS: any(too_many),
        LONGEST: max(lengths, default=0) > limits["longest"],
    }
    first = next((code for code, wrong in faults.items() if wrong), None)
    if first is None:
        assert status.tolist() == [-9] * 6
        assert table.tolist() == [[*item, 5] for item in whole] + [[0, 0, 0, -1]] * (capacity - len(items))
        assert torch.signbit(nan_mask)
        assert nan_mask == 0
    else:
        assert status.tolist()[:2] == [7, first]
        assert status.tolist()[5] == -8
        assert table.tolist() == [[0, 0, 0, -1]] * capacity
        assert nan_mask.isnan()


@given(cases())
def test_sizes_elsewhere_count_as_those_in_the_table(case):
    here, there = (run_check(reference.check_items, *case, elsewhere=device) for device in (None, "cpu"))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9))


@given(cases())
def test_what_the_host_has_seen_is_left_alone(case):
    items, capacity, _, _ = case
    table, status, nan_mask = run_check(reference.check_items, *case, unseen=0)
    assert status.tolist() == [-9] * 6
    assert table.tolist() == [[*item, 5] for item in items] + [[99] * 4] * (capacity - len(items))
    assert torch.signbit(nan_mask)


def test_the_operator_is_sound_for_the_compiler():
    header, table = torch.tensor([1, 1, 6, 1, 0]), torch.tensor([[1, 2, 3], [9, 9, 9]])
    tensors = header, table, torch.tensor([0, 0, 0]), torch.zeros(6, dtype=torch.int64), torch.tensor(0.0)
    torch.library.opcheck(check_items, (*tensors, 0, 1, 1, 4, 10, True, False, 2))


def test_a_veil_that_hides_nothing_changes_no_bit():
    x = torch.tensor([0.0, -0.0, 1e-45, -3.0, torch.inf, -torch.inf])
    y = x + torch.tensor(-0.0)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    assert (x + torch.tensor(torch.nan)).isnan().all()


def test_the_kernel_equals_the_reference():
    compare_kernel_and_reference("cuda" if torch.cuda.is_available() else "cpu")
