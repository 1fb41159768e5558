"""Buffers that graphs compute from the item table, and `buffers.DeviceBuffer`, against plain loops and towers."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import vision_utils
from transformers.exporters.utils import precompute_export_inputs

import varlen_graphs as vg
from tests.support import strategies
from tests.support.strategies import make_table
from tests.support.towers import qwen3_vl_tower

ORDERS = st.sampled_from(["raster", "merge_block"])
MODES = st.sampled_from(["bilinear", "bicubic"])


@given(strategies.tables(merge=2), ORDERS)
def test_grid_positions_equal_those_of_transformers(case, order):
    items, table = case
    expected = vision_utils.get_vision_position_ids(torch.tensor(items), 2 if order == "merge_block" else 1)
    got = vg.buffers.GridPositions(order=order).produce(table, None)
    assert got.dtype == torch.int64
    assert torch.equal(got[: len(expected)], expected)
    for largest in (3, 4):  # of which an item as large has all places
        limited = vg.buffers.GridPositions(order=order, largest=largest).produce(table, None)
        assert torch.equal(limited[: len(expected)], expected.clamp(max=largest - 1))


@given(strategies.tables())
def test_row_positions_begin_anew_for_each_item(case):
    items, table = case
    expected = [r for t, h, w in items for r in range(t * h * w)]
    assert vg.buffers.RowPositions().produce(table, None)[: len(expected)].tolist() == expected
    limited = vg.buffers.RowPositions(largest=3).produce(table, None)[: len(expected)].tolist()
    assert limited == [min(at, 2) for at in expected]


@given(strategies.tables(merge=2))
def test_the_rotary_table_equals_that_of_the_tower(case):
    items, table = case
    tower = qwen3_vl_tower()
    positions = vision_utils.get_vision_position_ids(torch.tensor(items), 2)
    expected = tower.rotary_pos_emb(torch.empty(0), positions)
    got = vg.buffers.RotaryTable(order="merge_block").produce(table, tower)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a[: len(positions)], b, rtol=0, atol=0)


def test_a_rotary_table_may_turn_along_one_axis():
    table = make_table([(1, 1, 5)], vg.budgets.Budget(8), vg.Lengths())
    inv_freq = torch.tensor([1.0, 0.1])
    cos, sin = vg.buffers.RotaryTable(inv_freq=inv_freq, axes=("row",)).produce(table, None)
    angles = torch.arange(5.0)[:, None] * torch.cat([inv_freq, inv_freq])
    torch.testing.assert_close(cos[:5], angles.cos())
    torch.testing.assert_close(sin[:5], angles.sin())


def test_unknown_axes_are_refused():
    table = make_table([(1, 1, 5)], vg.budgets.Budget(8), vg.Lengths())
    with pytest.raises(
        vg.errors.SpecError, match=re.escape("axes=('z',): expected one or more of 't', 'h', 'w', 'row'")
    ):
        vg.buffers.GridPositions(axes=("z",)).produce(table, None)


def resampled(entries, items, order, resample):
    """The rows that `resample(image, height, width)`, `[1, dim, height, width]`, gives for each item."""
    side, dim = math.isqrt(len(entries)), entries.shape[1]
    image = entries.T.reshape(1, dim, side, side)
    for t, h, w in items:
        grid = resample(image, h, w)[0].permute(1, 2, 0)
        if order == "merge_block":
            grid = grid.reshape(h // 2, 2, w // 2, 2, dim).transpose(1, 2)
        yield grid.reshape(1, h * w, dim).expand(t, -1, -1).flatten(0, 1)


@given(strategies.tables(merge=2), MODES, st.booleans(), ORDERS, st.sampled_from([1, 4, 7, 24]))
def test_interpolation_equals_that_of_torch(case, mode, align_corners, order, side):
    items, table = case
    entries = torch.randn(side * side, 5)
    got = vg.buffers.Interpolation(table=entries, mode=mode, align_corners=align_corners, order=order).produce(
        table, None
    )
    expected = torch.cat(
        list(
            resampled(
                entries,
                items,
                order,
                lambda image, h, w: F.interpolate(image, (h, w), mode=mode, align_corners=align_corners),
            )
        )
    )
    torch.testing.assert_close(got[: len(expected)], expected, rtol=0, atol=2e-5)
    at_rest = (
        entries[0] if align_corners else F.interpolate(entries.T.reshape(1, 5, side, side), 1, mode=mode).flatten()
    )
    torch.testing.assert_close(got[len(expected) :], at_rest.expand(len(got) - len(expected), -1), rtol=0, atol=2e-5)


def antialiased(image, h, w):
    """By torch; to a width of one by way of the transposed, because on a CPU all rows of that come out as the first."""
    if w == 1 < h:
        return antialiased(image.mT, w, h).mT
    return F.interpolate(image, (h, w), mode="bilinear", align_corners=False, antialias=True)


@given(strategies.tables(merge=2), ORDERS, st.sampled_from([1, 4, 7, 16, 27]))
def test_antialiased_interpolation_equals_that_of_torch(case, order, side):
    """Grids smaller and larger than the table, and smaller on one side alone."""
    items, table = case
    entries = torch.randn(side * side, 5)
    got = vg.buffers.Interpolation(table=entries, order=order, antialias=True).produce(table, None)
    expected = torch.cat(list(resampled(entries, items, order, antialiased)))
    torch.testing.assert_close(got[: len(expected)], expected, rtol=0, atol=1e-5)
    assert not got[len(expected) :].any()
    rows = torch.randn(table.budget.rows, 5)
    added = vg.buffers.interpolate_positions(entries, table, order=order, antialias=True, add=rows)
    assert torch.equal(added, rows + got)


@given(st.integers(1, 80), st.integers(1, 80), st.sampled_from([1, 5, 16]))
def test_antialiased_interpolation_to_any_size(h, w, side):
    table = make_table([(1, h, w)], vg.budgets.Budget(h * w + 3), vg.GridTHW())
    entries = torch.randn(side * side, 3)
    (expected,) = resampled(entries, [(1, h, w)], "raster", antialiased)
    got = vg.buffers.interpolate_positions(entries, table, antialias=True)[: h * w]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"mode": "bicubic"}, {"align_corners": True}])
def test_antialiasing_of_other_modes_is_refused(options):
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.GridTHW())
    with pytest.raises(vg.errors.SpecError, match="expected mode='bilinear' and align_corners=False"):
        vg.buffers.interpolate_positions(torch.randn(9, 3), table, antialias=True, **options)


def at_centres(mode, padding):
    """Return what samples an image at the centres of patches."""

    def sample(image, h, w):
        y, x = ((torch.arange(n) + 0.5) / n * 2 - 1 for n in (h, w))
        at = torch.stack([x.expand(h, w), y[:, None].expand(h, w)], dim=-1)
        return F.grid_sample(image, at[None], mode=mode, align_corners=False, padding_mode=padding)

    return sample


@given(strategies.tables(merge=2), MODES, ORDERS)
def test_interpolation_equals_sampling_at_the_centres_of_patches(case, mode, order):
    """As GLM-4.1V samples: the coordinates of half pixels, with the border repeated."""
    items, table = case
    entries = torch.randn(576, 5)
    expected = torch.cat(list(resampled(entries, items, order, at_centres(mode, "border"))))
    got = vg.buffers.interpolate_positions(entries, table, mode=mode, order=order)
    torch.testing.assert_close(got[: len(expected)], expected, rtol=0, atol=2e-5)


@given(strategies.tables(merge=2), MODES, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_interpolation_adds_what_is_already_there(case, mode, dtype):
    items, table = case
    entries, rows = torch.randn(49, 5).to(dtype), torch.randn(table.budget.rows, 5).to(dtype)
    active = sum(t * h * w for t, h, w in items)
    rows[active:] = torch.nan
    got = vg.buffers.interpolate_positions(entries, table, mode=mode, add=rows)
    assert torch.equal(got[:active], (rows + vg.buffers.interpolate_positions(entries, table, mode=mode))[:active])
    assert got[active:].isnan().all()


def test_what_is_added_has_the_shape_of_the_result():
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.GridTHW())
    with pytest.raises(
        vg.errors.InputError, match=re.escape("add is [4, 3]: expected [rows, dim] = [8, 3], with as many rows")
    ):
        vg.buffers.interpolate_positions(torch.randn(9, 3), table, add=torch.randn(4, 3))


@given(strategies.tables(merge=2), MODES, st.booleans(), ORDERS)
def test_interpolation_indices_and_weights_equal_those_of_transformers(case, mode, align_corners, order):
    items, table = case
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(items), 8, mode, align_corners, spatial_merge_size=2 if order == "merge_block" else 1
    )
    options = {"entries": 64, "mode": mode, "align_corners": align_corners, "order": order}
    got_indices = vg.buffers.InterpolationIndices(**options).produce(table, None)
    got_weights = vg.buffers.InterpolationWeights(**options).produce(table, None)
    entries = torch.randn(64, 3)  # at a border two taps may swap their zero weight: compare what they select
    expected = (entries[indices] * weights[..., None]).sum(1)
    got = (entries[got_indices] * got_weights[..., None]).sum(1)
    torch.testing.assert_close(got[: len(expected)], expected, rtol=0, atol=2e-6)
    assert ((got_indices >= 0) & (got_indices < 64)).all()


@given(strategies.tables(merge=2), ORDERS)
def test_taps_beyond_the_border_have_no_weight_with_padding_of_zeros(case, order):
    items, table = case
    entries = torch.randn(16, 3)  # a side of 4: many rows lie within half an entry of the border
    options = {"entries": 16, "order": order}
    indices = vg.buffers.InterpolationIndices(**options).produce(table, None)
    weights = vg.buffers.InterpolationWeights(**options, padding="zeros").produce(table, None)
    expected = torch.cat(list(resampled(entries, items, order, at_centres("bilinear", "zeros"))))
    got = (entries[indices] * weights[..., None]).sum(1)
    torch.testing.assert_close(got[: len(expected)], expected, rtol=0, atol=1e-5)


def test_interpolation_in_the_dtype_of_the_table_repeats_older_transformers():
    items = [(1, 6, 10)]
    table = make_table(items, vg.budgets.Budget(64), vg.GridTHW(merge=2))
    entries = torch.randn(64, 16).bfloat16()
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(items), 8, align_corners=True, spatial_merge_size=2
    )
    taps = entries[indices] * weights.bfloat16()[..., None]
    older = taps[:, 0] + taps[:, 1] + taps[:, 2] + taps[:, 3]
    newer = (entries[indices] * weights[..., None]).sum(1).bfloat16()
    options = {"table": entries, "align_corners": True, "order": "merge_block"}
    assert torch.equal(vg.buffers.Interpolation(**options, accum_dtype=None).produce(table, None)[:60], older)
    torch.testing.assert_close(vg.buffers.Interpolation(**options).produce(table, None)[:60], newer)
    assert not torch.equal(older, newer)


def test_a_table_that_is_not_square_is_refused():
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.GridTHW())
    with pytest.raises(vg.errors.SpecError, match="has 10 entries: expected a square number"):
        vg.buffers.Interpolation(table=torch.randn(10, 3)).produce(table, None)


def test_an_unknown_order_is_refused():
    with pytest.raises(
        vg.errors.SpecError, match=re.escape("order='rows'): expected 'raster', 'merge_block' or a Windows")
    ):
        vg.buffers.RotaryTable(inv_freq=torch.ones(2), order="rows")


def test_an_unknown_mode_is_refused():
    with pytest.raises(vg.errors.SpecError, match=re.escape("mode='nearest'): expected 'bilinear' or 'bicubic'")):
        vg.buffers.Interpolation(table=torch.randn(9, 3), mode="nearest")


def test_a_path_that_leads_to_no_tensor_is_refused():
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.GridTHW())
    with pytest.raises(
        vg.errors.SpecError, match=r"'pos_embed\.wait' does not exist in Qwen3VLVisionModel: expected the dotted"
    ):
        vg.buffers.Interpolation(table="pos_embed.wait").produce(table, qwen3_vl_tower())


def test_all_buffers_equal_what_transformers_precomputes_for_export():
    grid = [(1, 4, 6), (2, 8, 4)]
    tower = copy.deepcopy(qwen3_vl_tower())
    expected = {"hidden_states": torch.randn(88, 96), "grid_thw": torch.tensor(grid)}
    precompute_export_inputs(tower, expected)
    table = make_table(grid, vg.budgets.Budget(88, items=2, segments=3), vg.GridTHW(merge=2))
    options = {"entries": 64, "align_corners": True, "order": "merge_block"}
    got = {
        buffer.name: buffer.produce(table, tower)
        for buffer in (
            vg.buffers.CuSeqlens(per="frame"),
            vg.buffers.GridPositions(order="merge_block"),
            vg.buffers.InterpolationIndices(**options),
            vg.buffers.InterpolationWeights(**options),
        )
    }
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], check_dtype=False)
    assert math.prod(expected["interp_indices"].shape) == 88 * 4


def test_a_buffer_of_your_own_may_say_that_it_uses_no_segments():
    def usage(**options):
        buffers = [vg.buffers.DeviceBuffer("table", lambda table: table, **options)]
        return vg.BufferSpec("x", vg.GridTHW(), buffers).usage.of_items((4, 2, 2))

    assert (usage().segments, usage().longest) == (4, 16)
    assert (usage(any_segments=False).segments, usage(any_segments=False).longest) == (0, 0)


@pytest.mark.parametrize(
    ("per", "options", "other", "message"),
    [
        ("frame", {"any_segments": False}, None, "declare CuSeqlens(per='frame'), or leave out any_segments=False"),
        ("item", {"any_segments": False}, None, "declare CuSeqlens(per='item'), or leave out any_segments=False"),
        ("frame", {"any_segments": False}, "item", "cu_seqlens('frame'): budgets have no room for such segments"),
        (vg.layouts.Windows(2), {}, None, "declare CuSeqlens(per=Windows(side=2))"),
        ("frame", {}, None, None),
        ("item", {"any_segments": False}, "frame", None),
        ("frame", {"any_segments": False}, vg.layouts.Windows(2), None),
        (vg.layouts.Windows(2), {"any_segments": False}, vg.layouts.Windows(2), None),
    ],
)
def test_segments_that_nothing_counts_are_refused(per, options, other, message):
    class Counts(nn.Module):
        def forward(self, x, own, other=None):
            rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
            segment = torch.searchsorted(own, rows, right=True).clamp(max=len(own) - 1)
            return x * (own[segment] - own[segment - 1])[:, None]

    def boundaries(table):
        return table.cu_seqlens(per)

    buffers = [vg.buffers.DeviceBuffer("own", boundaries, **options)] + (
        [vg.buffers.CuSeqlens("other", per=other)] if other else []
    )
    spec = vg.BufferSpec("x", vg.GridTHW(), buffers)
    encoder = vg.GraphedEncoder(Counts().eval(), [vg.budgets.Budget(64, items=8, segments=16)], spec, backend="tape")
    rows, grid = torch.ones(24, 3), [(6, 2, 2)]
    if message is not None:
        with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
            encoder(rows, grid_thw=grid)
    else:
        assert torch.equal(encoder(rows, grid_thw=grid), rows * (24 if per == "item" else 4))


@pytest.mark.parametrize("options", [{}, {"any_segments": False}])
@pytest.mark.parametrize("layout", [vg.Lengths("sizes"), vg.layouts.GridHW("sizes")])
def test_frames_are_items_where_items_have_none(layout, options):
    class Counts(nn.Module):
        def forward(self, x, own, most):
            return x * own[-1]

    buffers = [
        vg.buffers.DeviceBuffer("own", lambda table: table.cu_seqlens("frame"), **options),
        vg.buffers.MaxSeqlen("most", "item"),
    ]
    spec = vg.BufferSpec("x", layout, buffers)
    encoder = vg.GraphedEncoder(Counts().eval(), [64], spec, backend="tape", verify=vg.options.Verify(at_capture=False))
    sizes = [6] if isinstance(layout, vg.Lengths) else [(2, 3)]
    assert torch.equal(encoder(torch.ones(6, 4), sizes=sizes), torch.full((6, 4), 6.0))


@pytest.mark.parametrize(
    ("values", "came"),
    [
        (torch.tensor([[6, 10], [4, 14]]), "int64 [2, 2]"),
        (torch.tensor([[1, 6, 10, 0]]), "int64 [1, 4]"),
        (torch.tensor([[1, 6, 10]]).int(), "int32 [1, 3]"),
        (torch.tensor([1, 6, 10]), "int64 [3]"),
        ([(1, 6, 10)], "list"),
    ],
)
def test_an_item_table_has_all_numbers_of_each_item(values, came):
    with pytest.raises(vg.errors.InputError, match=re.escape(f"{came}: expected int64 [items, 3], with t, h, w")):
        vg.layouts.ItemTable(values, vg.budgets.Budget(412), vg.GridTHW("grid"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_resampling_does_not_follow_the_default_dtype(dtype):
    table = vg.layouts.ItemTable(
        torch.tensor([[1, 6, 10], [2, 4, 14], [1, 8, 30]]), vg.budgets.Budget(412), vg.GridTHW()
    )
    entries = torch.randn(256, 8)
    expected = vg.buffers.interpolate_positions(entries, table, antialias=True)
    torch.set_default_dtype(dtype)
    try:
        got = vg.buffers.interpolate_positions(entries, table, antialias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)
