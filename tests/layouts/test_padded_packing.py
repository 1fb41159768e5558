"""Padded batches that are packed on their way in: the caller keeps its call, and the module has no padding."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention
from tests.support.padded import DIM, PACKED_BUDGETS, Packed, packed_encoder, packed_spec, padded_batch
from tests.support.towers import distance, equal_bits

PACKED = Packed().eval()


def packed_one_by_one(x, lengths):
    """What each item gives alone, in batches of zeros."""
    items = []
    for item, length in zip(x, lengths, strict=True):
        rows = Attention.forward(PACKED, item[:length], torch.tensor([0, length], dtype=torch.int32), length)
        items.append(rows.detach())
    rows = torch.zeros_like(x)
    for own, item in zip(rows, items, strict=True):
        own[: len(item)] = item
    return {
        "rows": rows,
        "positive": rows[..., 0] > 0,
        "first": torch.stack([item[0] for item in items]),
        "halves": torch.cat([item[::2] for item in items]),
    }


def same(got, expected):
    got, expected = dict(got), dict(expected)
    return torch.equal(got.pop("positive"), expected.pop("positive")) and distance(got, expected) < 1e-5


@pytest.fixture(scope="module")
def shared():
    """Captured once, for all examples of a property."""
    return packed_encoder()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 3))
def test_any_batch_gives_each_item_as_if_it_were_alone_and_zeros_past_its_end(shared, lengths, more, seed):
    x, mask = padded_batch(lengths, max(lengths) + more, seed)
    expected = packed_one_by_one(x, lengths)
    assert same(shared(x, mask=mask, lengths=lengths), expected)
    assert same(shared.eager(x, mask=mask, lengths=lengths), expected)


def test_the_padding_contract_holds():
    graphed = packed_encoder().capture()
    for number, lengths in enumerate([[96], [1], [9, 3, 20], [32], [1] * 8, [40, 40, 1, 15]]):
        over_nan, over_leftovers = padded_batch(lengths, 100, number), padded_batch(lengths, 100, number, fill=7.0)
        graphed.poison()
        first = graphed(over_nan[0], mask=over_nan[1], lengths=lengths)
        full = padded_batch([96], seed=100)
        graphed(full[0], mask=full[1], lengths=[96])
        second = graphed(over_leftovers[0], mask=over_leftovers[1], lengths=lengths)
        assert equal_bits(first, second), lengths
        assert same(first, packed_one_by_one(over_nan[0], lengths)), lengths
    assert not graphed.stats.eager


def test_padding_costs_no_rows():
    graphed, lengths = packed_encoder(), [5, 12, 9]
    x, mask = padded_batch(lengths, length=5000)
    assert graphed(x, mask=mask, lengths=lengths)["rows"].shape == (3, 5000, DIM)
    assert graphed.stats.replays == {PACKED_BUDGETS[0]: 1}
    assert graphed.stats.rows == 26


def test_items_and_masks_come_as_lists_and_tensors_of_any_kind(shared):
    lengths = [3, 9]
    x, mask = padded_batch(lengths)
    expected = packed_one_by_one(x, lengths)
    for marks in (mask, mask.int(), mask.tolist(), mask.numpy(), mask.to(torch.uint8)):
        assert same(shared(x, mask=marks, lengths=torch.tensor(lengths)), expected)
        assert same(shared(x.double(), mask=marks, lengths=lengths), expected)


def test_an_item_larger_than_every_budget_runs_eager_or_is_an_error():
    lengths = [5, 99, 7]
    x, mask = padded_batch(lengths)
    graphed = packed_encoder()
    assert same(graphed(x, mask=mask, lengths=lengths), packed_one_by_one(x, lengths))
    assert graphed.stats.eager == {"larger than every budget": 1}
    assert graphed.stats.replays.total() == 1
    with pytest.raises(vg.errors.BudgetError, match="item 1 is"):
        packed_encoder(on_miss="error")(x, mask=mask, lengths=lengths)


def test_token_ids_are_packed_too():
    class Tokens(nn.Embedding):
        def forward(self, ids, cu_seqlens):
            return super().forward(ids)

    rows = vg.inputs.Rows("ids", shape=(), dtype=torch.int64, padded_by="attention_mask")
    module = Tokens(50, DIM)
    graphed = vg.GraphedEncoder(
        module, PACKED_BUDGETS, vg.BufferSpec(rows, vg.Lengths(), [vg.buffers.CuSeqlens()]), backend="tape"
    )
    ids = torch.tensor([[4, 5, 10**9], [7, 8, 9]])  # no token where nothing is real
    out = graphed(ids, attention_mask=[[1, 1, 0], [1, 1, 1]], lengths=[2, 3])
    assert torch.equal(out[1], module.weight[7:10])
    assert torch.equal(out[0], torch.cat([module.weight[4:6], torch.zeros(1, DIM)]))


def test_columns_come_beside_the_mask():
    rows = vg.inputs.Rows("x", shape=(DIM,), padded_by="mask")
    graphed = vg.GraphedEncoder(
        nn.Linear(DIM, DIM),
        PACKED_BUDGETS,
        vg.BufferSpec(
            rows,
            vg.Lengths(
                columns=(
                    vg.layouts.Column("kind"),
                    vg.layouts.Column("most", function=lambda c: [max(c.rows)] * len(c)),
                )
            ),
            [
                vg.buffers.DeviceBuffer(
                    "factor", lambda table: (table.column("kind") * table.column("most"))[table.row_item]
                )
            ],
        ),
        forward=lambda module, x, factor: x * factor[:, None],
        backend="tape",
    )
    x, mask = padded_batch([2, 5], fill=0.0)
    out = graphed(x, mask=mask, lengths=[2, 5], kind=[3, 4])
    torch.testing.assert_close(out, x * torch.tensor([15.0, 20.0])[:, None, None])


def test_a_stage_has_nothing_to_write_in_place():
    with (
        pytest.raises(vg.errors.InputError, match="x comes as a padded batch, which is packed"),
        packed_encoder().stage([3]),
    ):
        pass


def test_hooks_run_the_forward_without_a_graph():
    graphed = packed_encoder(Packed().eval())
    x, mask = padded_batch([3, 9])
    handle = graphed.module.qkv.register_forward_hook(lambda *_: None)
    assert same(graphed(x, mask=mask, lengths=[3, 9]), packed_one_by_one(x, [3, 9]))
    handle.remove()
    assert graphed.stats.eager == {"forward hooks": 1}


X, MASK = padded_batch([3, 5])

CALLS = {
    "packed rows": ({"x": X[0]}, vg.errors.InputError, "x is [5, 8]: expected [batch, length, 8], a batch of items, each padded"),
    "no mask": ({"mask": None}, vg.errors.InputError, "argument 'mask' is missing: the call needs ['lengths', 'mask', 'x']"),
    "padding on the left": ({"mask": MASK.flip(1)}, vg.errors.LayoutError, "but not the first 3: expected items padded on the"),
    "other lengths": (
        {"lengths": [4, 5]}, vg.errors.LayoutError,
        "mask marks [3, 5] rows as real, but lengths describes items of [4, 5] rows: expected the same rows",
    ),
    "another batch": ({"lengths": [3]}, vg.errors.LayoutError, "lengths describes 1 item, the longest of 3 rows, but x is [2, 5"),
    "an item longer than the batch": ({"lengths": [3, 6]}, vg.errors.LayoutError, "the longest of 6 rows, but x is [2, 5, 8]"),
    "another mask": ({"mask": MASK[:, :4]}, vg.errors.LayoutError, "mask is [2, 4], but the rows are [2, 5, 8]: expected a mask"),
    "a mask of fewer items": ({"mask": MASK[1:]}, vg.errors.LayoutError, "mask marks [5] rows as real, but lengths describes items of"),
    "scores": ({"mask": MASK.float()}, vg.errors.LayoutError, "mask is a torch.float32 tensor: expected a key padding mask"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), CALLS.values(), ids=CALLS.keys())
def test_bad_calls_say_what_was_expected(shared, change, error, message):
    arguments = {"x": X, "mask": MASK, "lengths": [3, 5]} | change
    with pytest.raises(error, match=re.escape(message)):
        shared(**arguments)


DECLARATIONS = {
    "a layout of padded rows": (
        {"layout": vg.Mask("mask2")},
        "padded_by='mask') is to be packed, but Mask has padded rows: leave padded_by out, or declare Mask(packed=True)",
    ),
    "rows in another dimension": (
        {"rows": vg.inputs.Rows("x", shape=(1, DIM), rows_dim=1, padded_by="mask")},
        "a padded batch is [batch, length, ...]; leave rows_dim out",
    ),
    "one name twice": (
        {"rows": vg.inputs.Rows("x", shape=(DIM,), padded_by="lengths")}, "['lengths'] declared more than once",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DECLARATIONS.values(), ids=DECLARATIONS.keys())
def test_bad_declarations_say_what_was_expected(change, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        packed_spec(**change)
