"""Padded batches that their mask alone describes, packed on their way in."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.layouts.test_padded_packing import packed_one_by_one, same
from tests.support.padded import DIM, PACKED_BUDGETS, Packed, packed_spec, padded_batch
from tests.support.towers import equal_bits


def packed_forward(module, x, cu_seqlens, max_seqlen, first, halves):
    return module(x, cu_seqlens, max_seqlen, first, halves)


def mask_encoder(rows=None, options=None, **layout):
    """Return an encoder that is called with a padded batch and its mask."""
    spec = packed_spec(rows or vg.inputs.Rows("x", shape=(DIM,)), vg.Mask("mask", **layout, packed=True))
    options = {"backend": "tape"} | (options or {})
    return vg.GraphedEncoder(Packed().eval(), PACKED_BUDGETS, spec, forward=packed_forward, **options)


@pytest.fixture(scope="module")
def shared():
    """Captured once, for all examples of a property."""
    return mask_encoder(optional=True)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 3))
def test_any_batch_gives_each_item_as_if_it_were_alone_and_zeros_past_its_end(shared, lengths, more, seed):
    x, mask = padded_batch(lengths, max(lengths) + more, seed)
    expected = packed_one_by_one(x, lengths)
    assert same(shared(x, mask=mask), expected)
    assert same(shared.eager(x, mask=mask), expected)


def test_the_padding_contract_holds():
    graphed = mask_encoder().capture()
    for number, lengths in enumerate([[96], [1], [9, 3, 20], [32], [1] * 8, [40, 40, 1, 15]]):
        over_nan, over_leftovers = padded_batch(lengths, 100, number), padded_batch(lengths, 100, number, fill=7.0)
        graphed.poison()
        first = graphed(over_nan[0], mask=over_nan[1])
        full = padded_batch([96], seed=100)
        graphed(full[0], mask=full[1])
        assert equal_bits(first, graphed(over_leftovers[0], mask=over_leftovers[1])), lengths
        assert same(first, packed_one_by_one(over_nan[0], lengths)), lengths
    assert not graphed.stats.eager


def test_padding_costs_no_rows():
    graphed, lengths = mask_encoder(), [5, 12, 9]
    x, mask = padded_batch(lengths, length=5000)
    assert graphed(x, mask=mask)["rows"].shape == (3, 5000, DIM)
    assert graphed.stats.replays == {PACKED_BUDGETS[0]: 1}
    assert graphed.stats.rows == 26


@pytest.mark.parametrize("real", [True, False])
def test_masks_come_in_either_convention_and_as_lists_and_tensors_of_any_kind(real):
    graphed, lengths = mask_encoder(real=real), [3, 9]
    x, marked = padded_batch(lengths)
    mask, expected = marked == real, packed_one_by_one(x, lengths)
    for marks in (mask, mask.int(), mask.tolist(), mask.numpy(), mask.to(torch.uint8)):
        assert same(graphed(x, mask=marks), expected)


@pytest.mark.parametrize("real", [True, False])
def test_without_an_optional_mask_all_rows_are_real(real):
    graphed = mask_encoder(optional=True, real=real)
    x, _ = padded_batch([9, 9, 9])
    for call in ({}, {"mask": None}):
        assert same(graphed(x, **call), packed_one_by_one(x, [9, 9, 9]))
    assert not graphed.stats.eager


def test_a_padded_batch_that_stays_padded_may_leave_an_optional_mask_out():
    spec = vg.BufferSpec(vg.inputs.Rows("x", (DIM,)), vg.Mask("mask", optional=True), outputs=vg.outputs.Rows())

    class Scaled(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x) * (1 if mask is None else mask[..., None])

    module = Scaled(DIM, DIM).eval()
    graphed = vg.GraphedEncoder(module, vg.budgets.PaddedLadder(batch=4, length=32), spec, backend="tape")
    x, _ = padded_batch([9, 9])
    torch.testing.assert_close(graphed(x), module(x))
    assert not graphed.stats.eager


def test_an_item_larger_than_every_budget_runs_eager():
    lengths = [5, 99, 7]
    x, mask = padded_batch(lengths)
    graphed = mask_encoder()
    assert same(graphed(x, mask=mask), packed_one_by_one(x, lengths))
    assert graphed.stats.eager == {"larger than every budget": 1}


def test_token_ids_and_tensors_beside_them_are_packed_too():
    class Tokens(nn.Embedding):
        def forward(self, ids, kinds, attention_mask=None):
            return super().forward(ids) * kinds[..., None]

    module = Tokens(50, DIM).eval()
    spec = vg.BufferSpec(
        vg.inputs.Rows("ids", shape=(), dtype=torch.int64),
        vg.Mask(columns=(vg.layouts.Column("factor", default=1),), packed=True),
        [vg.buffers.DeviceBuffer("times", lambda table: table.column("factor")[table.row_item])],
        inputs=[vg.inputs.PerRow("kinds", dtype=torch.int64, default=1)],
    )
    graphed = vg.GraphedEncoder(
        module, PACKED_BUDGETS, spec, backend="tape",
        forward=lambda module, ids, kinds, times: module(ids, kinds) * times[:, None],
    )  # fmt: skip
    ids, mask = torch.tensor([[4, 5, 10**9], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    kinds = torch.tensor([[1, 2, 3], [4, 5, 6]])
    out = graphed(ids, kinds=kinds, attention_mask=mask)
    assert torch.equal(out, module(ids * mask, kinds) * mask[..., None])
    assert torch.equal(graphed(ids, attention_mask=mask, factor=[2, 3])[1], module.weight[7:10] * 3)


def test_a_stage_has_nothing_to_write_in_place():
    graphed = mask_encoder()
    with (
        pytest.raises(vg.errors.InputError, match="x comes as a padded batch, which is packed"),
        graphed.stage([[1, 1]]),
    ):
        pass


X, MASK = padded_batch([3, 5])

CALLS = {
    "packed rows": ({"x": X[0]}, vg.errors.InputError, "x is [5, 8]: expected [batch, length, 8], a batch of items, each padded"),
    "no mask": ({"mask": None}, vg.errors.InputError, "argument 'mask' is missing: the call needs ['mask', 'x']"),
    "padding on the left": ({"mask": MASK.flip(1)}, vg.errors.LayoutError, "but not the first 3: expected items padded on the"),
    "no real row": ({"mask": MASK & False}, vg.errors.LayoutError, "mask[0] has no rows, while the call has no rows at all"),
    "another length": ({"mask": MASK[:, :4]}, vg.errors.LayoutError, "mask is [2, 4], but the rows are [2, 5, 8]: expected a mask"),
    "fewer items": ({"mask": MASK[1:]}, vg.errors.LayoutError, "mask describes 1 item, the longest of 5 rows, but x is [2, 5, 8]"),
    "scores": ({"mask": MASK.float()}, vg.errors.LayoutError, "mask is a torch.float32 tensor: expected a key padding mask"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), CALLS.values(), ids=CALLS.keys())
def test_bad_calls_say_what_was_expected(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        mask_encoder()(**{"x": X, "mask": MASK} | change)


def test_bad_declarations_say_what_was_expected():
    with pytest.raises(
        vg.errors.SpecError, match=re.escape("but Mask('mask') is the mask of the batch: leave padded_by")
    ):
        mask_encoder(vg.inputs.Rows("x", shape=(DIM,), padded_by="other"))
    with pytest.raises(vg.errors.SpecError, match="leave rows_dim out"):
        mask_encoder(vg.inputs.Rows("x", shape=(1, DIM), rows_dim=1))
    spec = packed_spec(layout=vg.Mask("scale", packed=True), rows=vg.inputs.Rows("x", shape=(DIM,)))
    with pytest.raises(vg.errors.SpecError, match=r"Packed takes 'scale', the mask of a padded batch, but Mask"):
        vg.GraphedEncoder(Packed().eval(), PACKED_BUDGETS, spec)
