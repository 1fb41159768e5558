"""`layouts.Windows` and `buffers.WindowIndex`: which token is where, where windows begin, and what a budget needs."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import strategies
from tests.support.strategies import make_table
from varlen_graphs.declaration.reading import parse
from varlen_graphs.layouts.samples import sample_layout

sides = st.integers(1, 5)


def windows_of(items, side, merge):
    """The merged tokens of each window, in order, said as plainly as possible."""
    windows, first = [], 0
    for t, h, w in items:
        down, across = h // merge, w // merge
        for frame in range(t):
            for top in range(0, down, side):
                for left in range(0, across, side):
                    rows, columns = range(top, min(top + side, down)), range(left, min(left + side, across))
                    windows.append([first + (frame * down + y) * across + x for y in rows for x in columns])
        first += t * down * across
    return windows


def windowed_table(items, side, merge, spare_tokens=0, spare_segments=0):
    rows = sum(t * h * w for t, h, w in items) + spare_tokens * merge**2
    segments = len(windows_of(items, side, merge)) + spare_segments
    return make_table(items, vg.budgets.Budget(rows, items=len(items) + 1, segments=segments), vg.GridTHW(merge=merge))


def index_of(table, side, **options):
    return vg.buffers.WindowIndex(vg.layouts.Windows(side), **options).produce(table, None)


@given(st.sampled_from([1, 2]).flatmap(lambda m: st.tuples(st.just(m), strategies.grids(merge=m, max_side=24))), sides)
def test_tokens_come_window_by_window(case, side):
    merge, items = case
    windows = windows_of(items, side, merge)
    table = windowed_table(items, side, merge, spare_tokens=3, spare_segments=2)
    index = index_of(table, side)
    tokens = [token for window in windows for token in window]
    assert index.dtype == torch.int64
    assert index.tolist() == [*tokens, *range(len(tokens), len(tokens) + 3)]  # padding stays where it is
    back = index_of(table, side, inverse=True)
    assert torch.equal(index[back], torch.arange(len(index)))
    cu_seqlens = vg.buffers.CuSeqlens("cu_window_seqlens", per=vg.layouts.Windows(side)).produce(table, None)
    starts = torch.tensor([0, *map(len, windows)]).cumsum(0) * merge**2
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [*starts.tolist(), starts[-1], starts[-1]]


@given(strategies.grids(merge=2, max_side=40), st.sampled_from([16, 32, 48]))
def test_windows_equal_those_of_transformers(items, window_size):
    vision_utils = pytest.importorskip("transformers.vision_utils")
    side = window_size // 2 // 4
    expected, expected_seqlens = vision_utils.get_vision_window_index(torch.tensor(items), 2, window_size, 4)
    table = windowed_table(items, side, 2)
    assert torch.equal(index_of(table, side), expected)
    assert torch.equal(index_of(table, side, inverse=True), expected.argsort())
    assert torch.equal(table.cu_seqlens(vg.layouts.Windows(side)), expected_seqlens)


@given(strategies.grids(merge=2), sides)
def test_a_rotary_table_comes_in_window_order(items, side):
    table = windowed_table(items, side, 2, spare_tokens=2)
    inv_freq = torch.tensor([1.0, 0.1])
    blocks = vg.buffers.RotaryTable(inv_freq=inv_freq, order="merge_block").produce(table, None)
    windows = vg.buffers.RotaryTable(inv_freq=inv_freq, order=vg.layouts.Windows(side)).produce(table, None)
    for got, unordered in zip(windows, blocks, strict=True):
        assert torch.equal(got.view(-1, 4, 8), unordered.view(-1, 4, 8)[index_of(table, side)])


def spec_of(*per, merge=2):
    buffers = [vg.buffers.CuSeqlens(f"cu_{number}", per=one) for number, one in enumerate(per)]
    return vg.BufferSpec("x", vg.GridTHW(merge=merge), buffers)


@given(strategies.grids(merge=2), sides, st.sampled_from([(), ("frame",), ("item",), ("clip", "frame")]))
def test_budgets_hold_all_windows_and_the_longest_segment(items, side, others):
    spec = spec_of(vg.layouts.Windows(side), *others)
    table = windowed_table(items, side, 2)
    exact = spec.exact_budget(parse(spec, {"grid_thw": items}, ()))
    assert exact.segments == len(windows_of(items, side, 2))
    assert exact.max_seqlen == max(
        int(table.cu_seqlens(per).diff().max()) for per in (vg.layouts.Windows(side), *others)
    )
    usages = [spec.usage.of_items(item) for item in items]
    assert sum(usage.segments for usage in usages) == exact.segments
    assert max(usage.longest for usage in usages) == exact.max_seqlen
    most = spec.usage.most(sum(t * h * w for t, h, w in items), len(items), 1)
    assert most.segments >= exact.segments
    assert most.longest >= exact.max_seqlen


def test_the_most_rows_of_a_window_are_known_before_any_item_is():
    table = make_table([(1, 8, 8)], vg.budgets.Budget(64), vg.GridTHW(merge=2))
    small = make_table([(1, 2, 2)], vg.budgets.Budget(64, max_seqlen=8), vg.GridTHW(merge=2))
    window = vg.buffers.MaxSeqlen(per=vg.layouts.Windows(3))
    assert window.produce(table, None) == 36
    assert vg.buffers.MaxSeqlen(per="frame").produce(table, None) == 64
    assert window.produce(small, None) == 8


def test_items_of_too_many_windows_go_to_a_larger_budget():
    class Identity(torch.nn.Module):
        def forward(self, x, cu_window_seqlens):
            return x * 1

    buffers = [vg.buffers.CuSeqlens("cu_window_seqlens", per=vg.layouts.Windows(4))]
    budgets = [vg.budgets.Budget(256, segments=4), vg.budgets.Budget(512, segments=32)]
    encoder = vg.GraphedEncoder(
        Identity(), budgets, vg.BufferSpec("x", vg.GridTHW(merge=2), buffers), backend="tape", on_miss="error"
    )
    encoder(torch.ones(256, 1), grid_thw=[(1, 16, 16)])  # four whole windows
    encoder(torch.ones(20 * 12, 1), grid_thw=[(1, 12, 20)])  # fewer rows, but six windows
    assert {budget.rows: count for budget, count in encoder.stats.replays.items()} == {256: 1, 512: 1}
    with pytest.raises(vg.errors.BudgetError, match="needs 1 item of 512 rows in 64 segments of at most 8 rows, but"):
        encoder(torch.ones(512, 1), grid_thw=[(64, 2, 4)])


def test_windows_that_only_the_device_has_seen_are_counted_there():
    class Identity(torch.nn.Module):
        def forward(self, x, cu_window_seqlens):
            return x * 1

    spec = vg.BufferSpec(
        "x", vg.GridTHW(merge=2), [vg.buffers.CuSeqlens("cu_window_seqlens", per=vg.layouts.Windows(4))]
    )
    budgets = [vg.budgets.Budget(256, segments=16), vg.budgets.Budget(512, segments=512)]
    encoder = vg.GraphedEncoder(
        Identity(), budgets, spec, backend="tape", layouts=vg.options.GpuLayouts(min_segment_rows=16, simulated=True)
    )
    grid = torch.tensor([[1, 10, 10], [1, 12, 12]])
    assert encoder(torch.ones(244, 1), grid_thw=grid).isfinite().all()
    assert encoder(torch.ones(256, 1), grid_thw=torch.tensor([[32, 2, 4]])).isnan().all()  # 8 rows a window
    with pytest.raises(vg.errors.LayoutError, match="describes 32 segments, more than the 16 of the budget"):
        encoder.check()


@given(st.integers(1, 1500), st.integers(1, 40), st.integers(1, 100), st.integers(4, 1500), sides)
def test_the_layout_graphs_are_captured_with_fits_its_budget(rows, items, segments, longest, side):
    budget = vg.budgets.Budget(-(-rows // 4) * 4, items, segments, longest)
    for spec in (spec_of(vg.layouts.Windows(side)), spec_of(vg.layouts.Windows(side), "frame")):
        sample = sample_layout(spec.layout, budget, spec.usage.windows)
        assert budget.holds(*spec.usage.of(sample))
        spec.layout.parse([item[:3] for item in sample.items])


def test_the_layout_graphs_are_captured_with_has_whole_windows():
    spec = spec_of(vg.layouts.Windows(4), "frame")
    sample = sample_layout(spec.layout, vg.budgets.Budget(1024, items=4, segments=16), spec.usage.windows)
    assert spec.usage.of(sample) == (1024, 4, 16, 256)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: vg.layouts.Windows(0), "Windows(side=0): expected an integer of at least 1"),
        (
            lambda: spec_of(vg.layouts.Windows(4), vg.layouts.Windows(2)),
            "got [Windows(side=2), Windows(side=4)]: expected windows of one size",
        ),
        (
            lambda: vg.BufferSpec(
                "x",
                vg.GridTHW(),
                [vg.buffers.WindowIndex(vg.layouts.Windows(2)), vg.buffers.CuSeqlens("cu", per=vg.layouts.Windows(3))],
            ),
            "got [Windows(side=2), Windows(side=3)]: expected windows of one size",
        ),
        (
            lambda: vg.BufferSpec("x", vg.Lengths(), [vg.buffers.CuSeqlens(per=vg.layouts.Windows(4))]),
            "needs items with frames, which Lengths does not describe; declare GridTHW, with t = 1 for an image",
        ),
        (
            lambda: vg.BufferSpec("x", vg.layouts.GridHW(merge=2), [vg.buffers.CuSeqlens(per=vg.layouts.Windows(4))]),
            "needs items with frames, which GridHW does not describe; declare GridTHW, with t = 1 for an image",
        ),
        (lambda: spec_of(4), "CuSeqlens(per=4): expected 'frame', 'item', 'clip', 'group' or a Windows"),
    ],
)
def test_what_makes_no_sense_is_refused(declare, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        declare()


def test_attention_is_guessed_by_whole_windows():
    spec = spec_of(vg.layouts.Windows(4))
    layout = parse(spec, {"grid_thw": [(2, 16, 16)]}, ())
    assert spec.usage.squares(layout) == 8 * 64**2
    assert spec_of(vg.layouts.Windows(4), "frame").usage.squares(layout) == 2 * 256**2


@pytest.mark.parametrize(
    "budgets",
    [[1024], 1024, vg.Ladder(256, 1024), [512, vg.budgets.Budget(1024, segments=64)]],
    ids=lambda one: str(one),
)
@pytest.mark.parametrize("others", [(), ("frame",)])
def test_budgets_given_in_rows_have_a_segment_for_every_window_of_ordinary_images(budgets, others):
    encoder = windows_encoder(budgets, vg.layouts.Windows(4), *others)
    for grid in ([(1, 28, 36)], [(1, 36, 28)], [(1, 10, 98)], [(2, 22, 22)], [(1, 4, 4)] * 3):
        rows = torch.ones(sum(t * h * w for t, h, w in grid), 1)
        assert torch.equal(encoder(rows, grid_thw=grid), rows)
    assert not encoder.stats.eager


def windows_encoder(budgets, *per, **options):
    class Identity(torch.nn.Module):
        def forward(self, x, cu_0, cu_1=None):
            return x * 1

    return vg.GraphedEncoder(Identity().eval(), budgets, spec_of(*per), backend="tape", **options)


@pytest.mark.parametrize(
    ("budgets", "grid", "reason"),
    [
        ([64, 512], [(1, 24, 24)], "576 rows, and no budget has more than 512"),
        ([512], [(64, 2, 4)], "64 segments, and no budget has more than 32"),
        (
            [vg.budgets.Budget(256, segments=99), 512],
            [(64, 2, 4)],
            "64 segments, and no budget as large otherwise has more",
        ),
        ([vg.budgets.Budget(512, max_seqlen=32)], [(1, 8, 8)], "a segment of 64 rows, and no budget has more than 32"),
    ],
)
def test_an_item_that_no_budget_holds_is_reported_with_what_it_lacks(budgets, grid, reason):
    encoder, rows = windows_encoder(budgets, vg.layouts.Windows(4)), sum(t * h * w for t, h, w in grid)
    encoder(torch.ones(rows, 1), grid_thw=grid)
    assert encoder.stats.eager == {"larger than every budget": 1}
    assert encoder.stats.details["larger than every budget"].startswith(reason)
    assert f"1 eager run: larger than every budget; the last: {reason}" in encoder.report()
    strict = windows_encoder(budgets, vg.layouts.Windows(4), on_miss="error")
    with pytest.raises(vg.errors.BudgetError, match=reason):
        strict(torch.ones(rows, 1), grid_thw=grid)
