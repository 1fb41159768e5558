"""`buffers.RelativePositionBias`: against plain loops and modules of transformers, and over NaN."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.dense import LAYOUTS, DenseAttention, dense_encoder, item_by_item
from tests.support.encoders import rows_for
from tests.support.padded import padded_batch
from tests.support.strategies import make_table
from tests.support.towers import distance
from varlen_graphs.buffers import GridOffsets, RelativePositionBias, T5Buckets

BUCKETS = T5Buckets(buckets=8, max_distance=20)


def bias(index=BUCKETS, table="bias.weight", **options):
    return RelativePositionBias("bias", table, index, **options)


def padded_table(length, batch=2):
    return make_table([(1, 1, length)], vg.budgets.Budget.padded(batch, length), vg.Mask())


def t5_attention(buckets, distance, causal=False, heads=3):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=8, d_kv=4, num_heads=heads, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance, is_decoder=causal,
    )  # fmt: skip
    torch.manual_seed(0)
    return t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


@given(st.integers(4, 64), st.integers(1, 200), st.booleans())
def test_buckets_are_those_of_t5(buckets, eager_reason, causal):
    farthest = (buckets if causal else buckets // 2) // 2 + eager_reason
    module = t5_attention(buckets, farthest, causal, heads=1)
    module.relative_attention_bias.weight.copy_(torch.arange(buckets)[:, None])
    row = torch.arange(farthest + 5)
    got = T5Buckets(buckets, farthest, causal)(row - row[:, None])
    assert got.dtype == torch.int64
    assert torch.equal(got, module.compute_bias(len(row), len(row))[0, 0].long())


@pytest.mark.parametrize("causal", [False, True])
def test_the_bias_of_a_padded_batch_is_that_of_t5(causal):
    module = t5_attention(8, 20, causal)
    table = padded_table(50)
    got = bias(T5Buckets(8, 20, causal), "relative_attention_bias.weight").produce(table, module)
    assert got.is_contiguous()
    assert torch.equal(got, module.compute_bias(50, 50))
    own = vg.buffers.AttentionMask(dtype=None, causal=causal).produce(table, module) + got
    assert own.shape == (2, 3, 50, 50)


@given(
    strategies.grids(merge=2, max_items=3, max_side=6, max_frames=2),
    st.sampled_from(["raster", "merge_block"]),
    st.sampled_from(["row", "h w", "t w"]),
)
def test_the_bias_of_packed_rows(items, order, axes):
    weights, axes = torch.randn(3, 2), tuple(axes.split())
    table = make_table(items, vg.budgets.Budget(sum(t * h * w for t, h, w in items) + 5, items=4), vg.GridTHW(merge=2))
    declared = bias(lambda *offsets: sum(offsets).remainder(3), weights, axes=axes, order=order)
    got = declared.produce(table, None)
    assert got.shape == (1, 2, table.budget.rows, table.budget.rows)
    at, first = vg.buffers.GridPositions(order=order, axes=axes).produce(table, None).sum(1).tolist(), 0
    for t, h, w in items:
        own = at[first : first + t * h * w]
        expected = torch.tensor([[(key - query) % 3 for key in own] for query in own])
        block = got[0, :, first : first + len(own), first : first + len(own)]
        assert torch.equal(block, weights[expected].permute(2, 0, 1))
        first += len(own)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 5)])
def test_offsets_in_a_grid_are_those_of_swin_and_beit(height, width):
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    beit = pytest.importorskip("transformers.models.beit.modeling_beit")
    if not hasattr(swin, "SwinRelativePositionBias"):
        pytest.skip("this transformers has no module for it")
    module = swin.SwinRelativePositionBias(3, (height, width))
    nn.init.normal_(module.relative_position_bias_table)
    rows = height * width
    table = make_table([(1, height, width)], vg.budgets.Budget(rows), vg.layouts.GridHW())
    grid = bias(GridOffsets(height, width), "relative_position_bias_table", axes=("h", "w"))
    got = grid.produce(table, module)
    assert torch.equal(got, module())
    config = beit.BeitConfig(image_size=(4 * height, 4 * width), patch_size=4, num_attention_heads=3, hidden_size=12)
    at = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    index = grid.index(*(at - at[:, None]).unbind(-1))
    own = beit.BeitRelativePositionBias(config).generate_relative_position_index((height, width))
    assert torch.equal(index, own[1:, 1:])  # the first is the class token


def test_the_bias_of_a_smaller_grid_is_that_of_its_offsets():
    weights = torch.randn(7 * 9, 2)
    grid = bias(GridOffsets(4, 5), weights, axes=("h", "w"))
    whole = grid.produce(make_table([(1, 4, 5)], vg.budgets.Budget(20), vg.layouts.GridHW()), None).view(2, 4, 5, 4, 5)
    part = grid.produce(make_table([(1, 2, 3)], vg.budgets.Budget(6), vg.layouts.GridHW()), None).view(2, 2, 3, 2, 3)
    assert torch.equal(part, whole[:, :2, :3, :2, :3])


def test_offsets_that_are_not_in_the_table_are_nan_and_nothing_else_is():
    weights, budget = torch.randn(9, 2), vg.budgets.Budget(9 + 4 + 3, items=2)
    grid = bias(GridOffsets(2, 2), weights, axes=("h", "w"))
    got = grid.produce(make_table([(1, 3, 3), (1, 2, 2)], budget, vg.layouts.GridHW()), None)[0, 0]
    far = torch.tensor([[abs(a - b) > 1 for b in (0, 1, 2)] for a in (0, 1, 2)])
    nan = far[:, None, :, None] | far[None, :, None, :]
    assert torch.equal(got[:9, :9].isnan(), nan.reshape(9, 9))
    assert not got[9:].isnan().any()
    assert not got[:, 9:].isnan().any()


class RelativeAttention(nn.Module):
    """Computes its mask and its bias by itself, from a mask of real rows, or for one item of packed rows."""

    def __init__(self, index=BUCKETS, buckets=8):
        super().__init__()
        self.attention, self.index = DenseAttention(buckets=buckets), index
        self.eval()

    def forward(self, x, real=None):
        row = torch.arange(x.shape[-2], device=x.device)
        own = self.attention.bias(self.index(row - row[:, None])).permute(2, 0, 1)[None]
        return self.attention(x, bias=own if real is None else own.masked_fill(~real.bool()[:, None, None], -1e30))


def with_masks(module, x, mask, bias):
    return module.attention(x, mask, bias)


def test_the_padding_contract_holds_for_packed_rows():
    module = RelativeAttention()
    buffers = [vg.buffers.AttentionMask("mask", dtype=None), bias(table="attention.bias.weight")]
    encoder = dense_encoder(module, buffers, forward=with_masks)
    check_padding_contract(encoder, item_by_item(module), rows_for, "lengths", LAYOUTS, 1e-5)
    module.attention.bias.weight.mul_(-3)  # graphs read it at each replay
    x = rows_for([60, 20])
    assert distance(encoder(x, lengths=[60, 20]), item_by_item(module)(x, [60, 20])) < 1e-5


def padded_encoder(module, buffers, **options):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Mask("real"), buffers)
    budgets = [vg.budgets.Budget.padded(2, 24), vg.budgets.Budget.padded(4, 64)]
    return vg.GraphedEncoder(module, budgets, spec, forward=with_masks, **({"backend": "tape"} | options))


def test_a_padded_batch_equals_the_module_itself():
    module = RelativeAttention()
    encoder = padded_encoder(
        module, [vg.buffers.AttentionMask("mask", dtype=None), bias(table="attention.bias.weight")]
    )
    encoder.capture()
    for seed, lengths in enumerate([[64, 3], [5], [20, 64, 1, 7], [1]]):
        x, real = padded_batch(lengths, seed=seed, fill=0)
        encoder.poison()
        assert distance(encoder(x, real=real)[real], module(x, real)[real]) < 1e-5
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())


@pytest.mark.parametrize("wrong", [T5Buckets(8, 40), T5Buckets(8, 20, causal=True), lambda offset: BUCKETS(-offset)])
def test_another_function_of_positions_is_refused(wrong):
    buffers = [vg.buffers.AttentionMask("mask", dtype=None), bias(wrong, "attention.bias.weight")]
    with pytest.warns(UserWarning, match="something other than the module itself"):
        padded_encoder(RelativeAttention(), buffers).capture()


def test_items_larger_than_the_table_are_refused_and_padding_is_not():
    def offsets(offset):
        return offset + 29

    module = RelativeAttention(offsets, 59)
    own = bias(offsets, "attention.bias.weight", largest=30)
    encoder = padded_encoder(module, [vg.buffers.AttentionMask("mask", dtype=None), own]).capture()
    x, real = padded_batch([30, 4, 25], 40, fill=0)
    expected = module(x[:, :30], real[:, :30])
    assert distance(encoder(x, real=real)[real], expected[real[:, :30]]) < 1e-5  # in a budget of 64 rows an item
    assert not encoder.stats.eager
    x, real = padded_batch([31, 4])
    with pytest.raises(
        vg.errors.LayoutError, match="real\\[0\\] has a size of 31, but buffer 'bias' has entries up to 30"
    ):
        encoder(x, real=real)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T5Buckets(3), "expected at least 4 buckets"),
        (lambda: T5Buckets(1, causal=True), "expected at least 2 buckets"),
        (lambda: T5Buckets(32, 8), "max_distance above 8, the number of distances with their own bucket"),
        (lambda: GridOffsets(0, 3), "GridOffsets(height=0): expected an integer of at least 1"),
        (lambda: bias(axes=("z",)), "axes=('z',): expected one or more of 't', 'h', 'w', 'row'"),
        (lambda: bias(largest=0), "(largest=0): expected an integer of at least 1"),
        (lambda: bias("t5"), "RelativePositionBias(index='t5'): expected a function"),
    ],
)
def test_wrong_declarations_say_what_was_expected(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (bias(table="table"), "'table' does not exist in Linear"),
        (bias(table=torch.ones(3)), "the table of 'bias' is torch.float32 [3]: expected a floating tensor [buckets, heads]"),
        (bias(table=torch.ones(3, 2).long()), "is torch.int64 [3, 2]: expected a floating tensor"),
        (bias(lambda offset: offset.float(), torch.ones(3, 2)), "returned torch.float32 [5, 5]: expected integers of the shape"),
        (bias(lambda offset: offset[0], torch.ones(3, 2)), "returned torch.int64 [5]: expected integers of the shape"),
        (bias(GridOffsets(4, 4), torch.ones(49, 2), axes=("h", "w")), "expected axes=('row',) in a padded batch"),
    ],
)  # fmt: skip
def test_what_only_a_forward_shows_is_refused_there(declared, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        declared.produce(padded_table(5), nn.Linear(2, 2))


def test_half_precision_keeps_the_dtype_of_the_table():
    got = bias(table=torch.randn(8, 2).bfloat16()).produce(padded_table(30), None)
    assert got.dtype == torch.bfloat16
    assert math.isfinite(got.float().sum())
