"""`GridTHW`, `GridHW` and `Lengths`: which items calls describe, and what is refused."""

import re

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import vision_utils

import varlen_graphs as vg
from tests.support import strategies
from tests.support.encoders import SIMULATED
from tests.support.strategies import make_table
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.layouts.samples import sample_layout


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2, 4], [3, 6, 2]],
        ((1, 2, 4), (3, 6, 2)),
        torch.tensor([[1, 2, 4], [3, 6, 2]]),
        torch.tensor([[1, 2, 4], [3, 6, 2]], dtype=torch.int32),
        numpy.array([[1, 2, 4], [3, 6, 2]]),
        [[1, 2, 4], (numpy.int64(3), 6, numpy.int32(2))],
    ],
)
def test_grids_come_as_lists_tensors_and_arrays(value):
    assert vg.GridTHW(merge=2).parse(value) == [(1, 2, 4), (3, 6, 2)]


@pytest.mark.parametrize("value", [[[2, 4], (6, 2)], torch.tensor([[2, 4], [6, 2]]), numpy.array([[2, 4], [6, 2]])])
def test_sizes_of_images_come_as_lists_tensors_and_arrays(value):
    assert vg.layouts.GridHW().parse(value) == [(1, 2, 4), (1, 6, 2)]


@pytest.mark.parametrize("value", [[3, 1], torch.tensor([3, 1])])
def test_lengths_come_as_lists_and_tensors(value):
    assert vg.Lengths().parse(value) == [(1, 1, 3), (1, 1, 1)]


@pytest.mark.parametrize(
    ("layout", "value", "message"),
    [
        (vg.GridTHW(merge=2), [[1, 3, 4]], "grid_thw[0] is (1, 3, 4): h and w must be divisible by the merge size 2"),
        (vg.GridTHW(), [[1, 2, 4], [1, -2, 4]], "grid_thw[1] is [1, -2, 4]: every size must be at least 0"),
        (vg.GridTHW(), [], "grid_thw is empty: expected at least one item; skip the call"),
        (vg.GridTHW(), torch.empty(0, 3, dtype=torch.long), "grid_thw is empty"),
        (vg.GridTHW(), [[1, 2]], "grid_thw[0] is [1, 2]: expected three integers (t, h, w)"),
        (vg.GridTHW(), [1, 2, 3], "grid_thw[0] is 1: expected three integers (t, h, w)"),
        (vg.GridTHW(), [[1, 2.0, 4]], "expected integers, got 2.0 (float)"),
        (vg.GridTHW(), [[1, True, 4]], "expected integers, got True (bool)"),
        (vg.GridTHW(), torch.ones(1, 3), "grid_thw is a torch.float32 tensor: expected integers"),
        (vg.GridTHW(), [[1, 2**70, 4]], "sizes must be below 2**63; no call has that many rows"),
        (vg.GridTHW(), "no", "grid_thw is 'no': expected integers"),
        (vg.GridTHW(), 7, "grid_thw is 7: expected integers"),
        (vg.GridTHW(), torch.tensor(7), "grid_thw is 7: expected integers"),
        (vg.layouts.GridHW(), [[1, 2, 4]], "spatial_shapes[0] is [1, 2, 4]: expected two integers (h, w)"),
        (vg.layouts.GridHW(), [3, 4], "spatial_shapes[0] is 3: expected two integers (h, w)"),
        (vg.layouts.GridHW("tgt_sizes"), [[3, 4], [-1, 4]], "tgt_sizes[1] is [-1, 4]: every size must be at least 0"),
        (
            vg.layouts.GridHW(),
            torch.ones(1, 2),
            "spatial_shapes is a torch.float32 tensor: expected integers, [items, 2] of (h, w)",
        ),
        (vg.Lengths(), [3, -1], "lengths[1] is -1: every size must be at least 0"),
        (vg.Lengths(), [[3]], "lengths[0] is [3]: expected integers"),
    ],
)
def test_bad_items_say_what_was_expected(layout, value, message):
    with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
        layout.parse(value)


def test_a_merge_below_one_is_refused():
    with pytest.raises(vg.errors.SpecError, match=re.escape("GridTHW(merge=0): expected an integer of at least 1")):
        vg.GridTHW(merge=0)


@given(strategies.tables())
def test_every_row_knows_its_item(case):
    items, table = case
    expected = [(i, r) for i, (t, h, w) in enumerate(items) for r in range(t * h * w)]
    active = table.row_active
    assert active.sum() == len(expected)
    assert active[: len(expected)].all()
    assert list(zip(table.row_item[active].tolist(), table.row_in_item[active].tolist(), strict=True)) == expected
    assert not table.row_in_item[~active].any()


@given(strategies.tables(merge=2), st.sampled_from(["raster", "merge_block"]))
def test_positions_equal_those_of_transformers(case, order):
    items, table = case
    merge = 2 if order == "merge_block" else 1
    expected = vision_utils.get_vision_position_ids(torch.tensor(items), merge, include_temporal=True)
    got = torch.stack(table.positions(order), dim=1)
    assert torch.equal(got[: len(expected)], expected)
    assert not got[len(expected) :].any()


@given(strategies.tables(), st.sampled_from(["frame", "item", "clip"]))
def test_cu_seqlens_equal_those_of_transformers_and_repeat_the_last(case, per):
    items, table = case
    expected = vision_utils.get_vision_cu_seqlens(torch.tensor(items), merge_temporal=per != "frame")
    got = table.cu_seqlens(per)
    assert got.dtype == torch.int32
    assert got.shape == (table.budget.segments + 1,)
    assert torch.equal(got[: len(expected)], expected)
    assert (got[len(expected) :] == expected[-1]).all()


def test_a_module_sees_the_sizes_of_images_and_a_graph_reads_them_where_they_are():
    class Sizes(torch.nn.Module):
        def forward(self, x, spatial_shapes, place):
            return {"x": x, "sizes": spatial_shapes, "place": torch.stack(place, 1)}

    declared = BufferSpec(
        "x",
        vg.layouts.GridHW(),
        [vg.buffers.DeviceBuffer("place", lambda table: table.positions("raster"), any_segments=False)],
        vg.outputs.Fields(x=vg.outputs.Rows(), sizes=vg.outputs.Items(), place=vg.outputs.Rows()),
    )
    encoder = vg.GraphedEncoder(Sizes(), [16], declared, **SIMULATED)
    sizes = [[2, 3], [1, 4]]
    place = [(0, h, w) for height, width in sizes for h in range(height) for w in range(width)]
    for value in (
        sizes,
        torch.tensor(sizes),
        torch.tensor(sizes, dtype=torch.int32),
    ):  # a tensor is not read on the host
        out = encoder(torch.ones(10, 1), spatial_shapes=value)
        assert out["sizes"].tolist() == sizes
        assert out["place"].tolist() == [list(at) for at in place]
    encoder(torch.ones(9, 1), spatial_shapes=torch.tensor(sizes))
    with pytest.raises(vg.errors.LayoutError, match="rows"):
        encoder.check()


def test_columns_are_found_by_name():
    layout = vg.GridTHW(columns=(vg.layouts.Column("a"), vg.layouts.Column("b", pad=-1)))
    table = vg.layouts.ItemTable(torch.tensor([[1, 1, 1, 7, 8]]), vg.budgets.Budget(1), layout)
    assert table.column("b").tolist() == [8]
    with pytest.raises(vg.errors.SpecError, match="no column 'c': the layout declares \\['a', 'b'\\]"):
        table.column("c")


@given(
    st.integers(1, 5000),
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(4, 5000),
    st.sampled_from([vg.Lengths(), vg.layouts.GridHW(), vg.GridTHW(merge=2)]),
)
def test_the_layout_graphs_are_captured_with_fits_its_budget(rows, items, segments, longest, layout):
    budget = vg.budgets.Budget(-(-rows // 4) * 4, items, segments, longest)
    spec = BufferSpec("x", layout, [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()])
    sample = sample_layout(layout, budget)
    assert budget.holds(*[getattr(spec.exact_budget(sample), n) for n in ("rows", "items", "segments", "max_seqlen")])
    described = {vg.GridTHW: slice(3), vg.layouts.GridHW: slice(1, 3), vg.Lengths: 2}[type(layout)]
    layout.parse([item[described] for item in sample.items])


def test_the_table_is_computed_without_reading_it_on_the_host():
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.GridTHW(merge=2))
    meta = vg.layouts.ItemTable(table.values.to("meta"), table.budget, table.layout)  # a read would raise
    assert meta.cu_seqlens("frame").shape == (9,)
    assert [p.shape for p in meta.positions("merge_block")] == [(8,)] * 3
