"""`layouts.NestedColumn`: items that belong together, and queries that attend to each, or to each group."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.clips import BUDGETS, COLUMN, DIM, QUERIES, clip_rows, clips_encoder
from tests.support.contract import check_padding_contract
from tests.support.encoders import SIMULATED, UNVERIFIED
from tests.support.towers import distance
from varlen_graphs.declaration.reading import parse
from varlen_graphs.layouts.samples import sample_layout

SHARED = clips_encoder()


def check_clips(encoder, sizes, times):
    rows = clip_rows(sizes)
    with torch.no_grad():
        expected = encoder.module.plain(rows, sizes, times)
    for output in (encoder(rows, sizes=sizes, times=times), encoder.eager(rows, sizes=sizes, times=times)):
        assert distance({k: v.double() for k, v in output.items()}, expected) < 1e-5


@st.composite
def clips(draw):
    """Frames of any size, and their times, nested by clips of some of them."""
    groups = draw(st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=4), min_size=1, max_size=6))
    side = st.integers(1, 5)
    return [(draw(side), draw(side)) for group in groups for _ in group], groups


@settings(max_examples=40)
@given(clips())
def test_any_call_equals_one_clip_at_a_time_however_it_is_split(case):
    check_clips(SHARED, *case)


def test_the_padding_contract_holds_for_groups():
    encoder = clips_encoder(BUDGETS)
    layouts = [
        ([(4, 4), (4, 4), (4, 8)], [[1, 2], 3]),
        ([(1, 1)], [[5]]),
        ([(2, 3), (5, 1), (1, 7), (2, 2)], [-1, [2, 6], -1]),
        ([(3, 3)] * 6, [[1], [2], [3], [4], [5], [6]]),  # no item of padding
        ([(2, 2)] * 6, [[1, 2, 3, 4, 5, 6]]),  # five slots for groups without rows
        ([(4, 8)], [[0]]),  # exactly the smaller budget
    ]

    def original(rows, layout):
        with torch.no_grad():
            return encoder.module.plain(rows, *layout)

    def arguments(layout):
        return dict(zip(("sizes", "times"), layout, strict=True))

    def make_rows(layout, seed):
        return clip_rows(layout[0], seed)

    check_padding_contract(encoder, original, make_rows, "sizes", layouts, 1e-5, more=arguments)


def test_a_group_is_never_parted():
    encoder = clips_encoder([vg.budgets.Budget(20, items=2)])
    check_clips(encoder, [(3, 3)] * 5, [0, [1, 2], 3, [4]])
    assert [sum(encoder.stats.replays.values()), dict(encoder.stats.eager)] == [3, {}]  # of 18 rows, 18 and 9
    check_clips(encoder, [(3, 3)] * 4, [[1, 2, 3], 0])
    assert encoder.stats.eager == {"larger than every budget": 1}
    assert "the last: 27 rows, and no budget has more than 20" in encoder.report()
    wide = clips_encoder([vg.budgets.Budget(40, items=2)])
    check_clips(wide, [(3, 3)] * 4, [[1, 2, 3], 0])
    assert "the last: 3 items, and no budget has more than 2" in wide.report()


def test_a_group_that_fits_no_budget_is_named():
    encoder = clips_encoder([vg.budgets.Budget(20, items=2)], on_miss="error")
    with pytest.raises(
        vg.errors.BudgetError, match=re.escape("items [1, 2, 3], a group, are [(1, 3, 3), (1, 3, 3), (1, 3, 3)]")
    ):
        encoder(clip_rows([(3, 3)] * 4), sizes=[(3, 3)] * 4, times=[0, [1, 2, 3]])


def test_the_longest_segment_of_a_group_is_all_of_it():
    spec = SHARED.spec
    assert spec.usage.of_items((1, 2, 2, 0, 1), (1, 3, 3, 0, 0)) == (13, 2, 2, 13)
    assert spec.usage.of_items((1, 2, 2, 0, 1)) == (4, 1, 1, 4)
    layout = vg.layouts.Layout(((1, 2, 2, 0, 1), (1, 3, 3, 0, 0), (1, 1, 1, 0, 1)), grouped=True)
    assert spec.usage.of(layout) == (14, 3, 3, 13)
    assert layout.groups == [range(2), range(2, 3)]


def test_a_buffer_of_your_own_may_use_the_segments_of_groups():
    """Its segments are whole groups, so a budget of shorter ones does not hold them."""
    buffer = vg.buffers.DeviceBuffer("longest", lambda table: table.max_seqlen("group"))
    spec = vg.BufferSpec("x", SHARED.spec.layout, [buffer])
    assert spec.usage.of_items((1, 2, 2, 0, 1), (1, 3, 3, 0, 0)).longest == 13
    encoder = vg.GraphedEncoder(
        nn.Identity(),
        [vg.budgets.Budget(32, max_seqlen=9), vg.budgets.Budget(64, max_seqlen=64)],
        spec,
        forward=lambda module, x, longest: x * 0 + longest,
        backend="tape",
        verify=UNVERIFIED,
    )
    assert (encoder(torch.zeros(13, 1), sizes=[(2, 2), (3, 3)], times=[[0, 1]]) >= 13).all()


SIZES = [(1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    ("times", "flat", "begins"),
    [
        ([[4], [5, 6]], [4, 5, 6], [1, 1, 0]),
        ([4, [5, 6]], [4, 5, 6], [1, 1, 0]),
        ((4, (5, 6)), [4, 5, 6], [1, 1, 0]),
        ([torch.tensor([4]), torch.tensor([5, 6])], [4, 5, 6], [1, 1, 0]),
        ([numpy.int64(4), numpy.array([5, 6])], [4, 5, 6], [1, 1, 0]),
        ([[None], [None, 6]], [-1, -1, 6], [1, 1, 0]),
        ([4, 5, 6], [4, 5, 6], [1, 1, 1]),
        ([[torch.tensor(4), torch.tensor(5)], [torch.tensor(6)]], [4, 5, 6], [1, 0, 1]),
        ([torch.tensor(4), [5, torch.tensor(6, dtype=torch.int32)]], [4, 5, 6], [1, 1, 0]),
        ([[[4], [5]], [], [[torch.tensor(6)]]], [4, 5, 6], [1, 1, 1]),
        ([[[4, None]], [[6]]], [4, -1, 6], [1, 0, 1]),
        (torch.tensor([4, 5, 6]), [4, 5, 6], [1, 1, 1]),
        ([None, None, None], [-1, -1, -1], [1, 1, 1]),
        (None, [-1, -1, -1], [1, 1, 1]),
    ],
)
def test_groups_come_nested_and_alone_flat(times, flat, begins):
    layout = parse(SHARED.spec, {"sizes": SIZES, "times": times}, (9, DIM))
    assert [item[3:] for item in layout.items] == list(zip(flat, begins, strict=True))
    output = SHARED(clip_rows(SIZES), sizes=SIZES, times=times)
    assert (output["times"] - 2).tolist() == flat
    assert len(output["clips"]) == QUERIES * sum(begins)


def test_nested_and_flat_say_the_same():
    rows = clip_rows(SIZES)
    outputs = [SHARED(rows, sizes=SIZES, times=times)["clips"] for times in ([[-1], [-1], [-1]], [-1] * 3, None)]
    outputs.append(SHARED(rows, sizes=SIZES)["clips"])
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([[4], []], "times[1] is empty: expected at least one item in every group; drop it"),
        ([[4], [5]], "times is [4, 5]: expected one integer for each of 3 items"),
        ([[4], [[5, 6]]], "times is [4, [5, 6]]: expected one integer for each of 3 items"),
        ([[[4], []], [[5, 6]]], "times[1] is empty: expected at least one item in every group; drop it"),
        ([[], []], "times[0] is empty: expected at least one item in every group; drop it"),
        ([[torch.tensor(4.0)], [5, 6]], "times is [4.0, 5, 6]: expected one integer for each of 3 items"),
        ([[torch.tensor(True)], [5, 6]], "times is [True, 5, 6]: expected one integer for each of 3 items"),
        ([[4], [5, 6.0]], "times is [4, 5, 6.0]: expected one integer"),
        (7, "times is 7: expected integers, one for each item, or a list of them for each group"),
    ],
)
def test_bad_groups_say_what_was_expected(times, message):
    with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
        SHARED(clip_rows(SIZES), sizes=SIZES, times=times)


def test_a_column_without_a_default_has_to_come():
    column = vg.layouts.Column("kind")
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("kind is [1, None]: expected one integer for each of 2 items")
    ):
        column.parse([1, None], 2)
    spec = vg.BufferSpec("x", vg.Lengths(columns=(column, vg.layouts.Column("mark", default=3))))
    encoder = vg.GraphedEncoder(
        nn.Identity(), [32], spec, forward=lambda module, x, kind, mark: x + mark[0] + kind[0], backend="tape"
    )
    with pytest.raises(
        vg.errors.InputError, match=re.escape("argument 'kind' is missing: the call needs ['kind', 'lengths', 'x']")
    ):
        encoder(torch.zeros(4, 2), lengths=[4])
    assert (encoder(torch.zeros(4, 2), lengths=[4], kind=[2]) == 5).all()
    assert (encoder(torch.zeros(4, 2), lengths=[4], kind=[2], mark=[None]) == 5).all()
    assert (encoder(torch.zeros(4, 2), lengths=[4], kind=[2], mark=[1]) == 3).all()


@given(clips(), st.integers(0, 4), st.integers(0, 5))
def test_cu_seqlens_of_groups_repeat_the_last(case, more_items, more_segments):
    sizes, groups = case
    layout = parse(SHARED.spec, {"sizes": sizes, "times": groups}, ())
    budget = vg.budgets.Budget(layout.total, len(sizes) + more_items, len(sizes) + more_items + more_segments)
    values = torch.tensor([*layout.items, *[(0, 0, 0, -1, 1)] * more_items])
    got = vg.buffers.CuSeqlens(per="group").produce(vg.layouts.ItemTable(values, budget, SHARED.spec.layout), None)
    expected = torch.tensor([0, *layout.group_rows]).cumsum(0)
    assert got.dtype == torch.int32
    assert torch.equal(got[: len(expected)], expected.int())
    assert (got[len(expected) :] == expected[-1]).all()
    assert len(got) == budget.segments + 1


def test_every_segment_has_as_many_queries():
    table = vg.layouts.ItemTable(
        torch.tensor([[1, 2, 2], [0, 0, 0]]), vg.budgets.Budget(8, items=2, segments=4), vg.layouts.GridHW()
    )
    assert vg.buffers.CuSeqlens(queries=64).produce(table, None).tolist() == [0, 64, 128, 128, 128]
    schedule = vg.buffers.AttentionSchedule(2, 8, queries=64).produce(table, None)
    assert (
        schedule.tiles.shape
        == vg.attention.tile_schedule(
            torch.tensor([0, 64, 128, 128, 128]).int(), 64, rows=128, heads=2, head_dim=8
        ).tiles.shape
    )


def test_graphs_are_captured_with_every_item_alone():
    layout = sample_layout(SHARED.spec.layout, vg.budgets.Budget(64, items=4))
    assert layout.grouped
    assert len(layout.groups) == 4


def test_grids_on_the_device_are_not_read_on_the_host():
    encoder = vg.GraphedEncoder(
        nn.Identity(),
        [vg.budgets.Budget(64, items=4, segments=64)],
        vg.BufferSpec(
            "x",
            vg.layouts.GridHW("tgt_sizes"),
            [vg.buffers.DeviceBuffer("at", lambda table: table.positions("raster")[1])],
        ),
        forward=lambda module, x, at, tgt_sizes: x * 0 + at[:, None] + 10 * tgt_sizes[0, 1],
        **SIMULATED,
        verify=UNVERIFIED,
    )
    output = encoder(torch.zeros(12, 1), tgt_sizes=torch.tensor([[2, 3], [3, 2]]))
    assert output.flatten().tolist() == [30, 30, 30, 31, 31, 31, 30, 30, 31, 31, 32, 32]
    encoder(torch.zeros(12, 1), tgt_sizes=torch.tensor([[2, 3], [3, 3]]))
    with pytest.raises(vg.errors.LayoutError, match="tgt_sizes describes more rows in all, but 12 came"):
        encoder.check()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.BufferSpec("x", vg.layouts.GridHW(), [vg.buffers.CuSeqlens(per="group")]), "needs groups of items, which 'spatial_shapes' does not describe: declare a NestedColumn, or use per='item'"),
        (lambda: vg.BufferSpec("x", vg.layouts.GridHW(), outputs=vg.outputs.Groups()), "Groups(rows=1, rows_dim=0) needs groups of items, which 'spatial_shapes' does not describe: declare a NestedColumn, or use Items(...)"),
        (lambda: vg.BufferSpec("x", vg.layouts.GridHW(columns=(COLUMN, vg.layouts.NestedColumn("b")))), "columns ['times', 'b'] would all describe the groups: expected one NestedColumn"),
        (lambda: vg.buffers.CuSeqlens(queries=0), "expected queries of at least 1, with per='item', 'clip' or 'group'"),
        (lambda: vg.buffers.AttentionSchedule(1, 8, per="frame", queries=4), "expected queries of at least 1, with per='item', 'clip' or 'group'"),
        (lambda: vg.outputs.Groups(rows=0), "expected an integer of at least 1"),
    ],
)  # fmt: skip
def test_bad_declarations_raise_named_errors(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()


def test_a_table_without_groups_says_so():
    table = vg.layouts.ItemTable(torch.tensor([[1, 2, 2]]), vg.budgets.Budget(8), vg.layouts.GridHW())
    with pytest.raises(vg.errors.SpecError, match="needs groups of items, which 'spatial_shapes' does not describe"):
        table.cu_seqlens("group")


def test_groups_of_a_padded_batch_stay_together():
    spec = vg.BufferSpec(
        "x",
        vg.Lengths(columns=(COLUMN,), padded=True),
        outputs=vg.outputs.Fields(rows=vg.outputs.Rows(), first=vg.outputs.Items()),
    )
    encoder = vg.GraphedEncoder(
        nn.Identity(),
        [vg.budgets.Budget.padded(2, 8)],
        spec,
        forward=lambda m, x: {"rows": x, "first": x[:, 0]},
        backend="tape",
    )
    x = torch.randn(4, 8, 2)
    output = encoder(x, lengths=[8, 8, 8, 8], times=[1, [2, 3], 4])
    assert torch.equal(output["rows"], x)
    assert [*encoder.stats.replays.values()] == [2]
