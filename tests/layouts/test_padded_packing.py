"""`Rows(padded_by=)` and `Mask(packed=True)`: padded batches are packed on their way in, and the module has no padding.

Lengths come beside the mask in the first, and the mask alone describes the batch in the second.
"""

import re
from functools import cache

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


def packed_forward(module, x, cu_seqlens, max_seqlen, first, halves):
    return module(x, cu_seqlens, max_seqlen, first, halves)


def mask_encoder(rows=None, real=True, optional=False, **options):
    """Return an encoder that is called with a padded batch and its mask."""
    layout = vg.Mask("mask", real=real, optional=optional, packed=True)
    spec = packed_spec(rows or vg.inputs.Rows("x", shape=(DIM,)), layout)
    return vg.GraphedEncoder(
        Packed().eval(), PACKED_BUDGETS, spec, forward=packed_forward, **({"backend": "tape"} | options)
    )


def optional_mask_encoder(**options):
    return mask_encoder(optional=True, **options)


shared = cache(lambda make: make())
"""Captured once, for all examples of a property."""


def call_of(make, lengths, *size, **options):
    """Return the arguments of a call, as an encoder takes them."""
    x, mask = padded_batch(lengths, *size, **options)
    return {"x": x, "mask": mask} | ({"lengths": lengths} if make is packed_encoder else {})


described = pytest.mark.parametrize("make", [packed_encoder, mask_encoder])


@pytest.mark.parametrize("make", [packed_encoder, mask_encoder, optional_mask_encoder])
@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), more=st.integers(0, 40), seed=st.integers(0, 3))
def test_any_batch_gives_each_item_as_if_it_were_alone_and_zeros_past_its_end(make, lengths, more, seed):
    call = call_of(make, lengths, max(lengths) + more, seed)
    expected = packed_one_by_one(call["x"], lengths)
    assert same(shared(make)(**call), expected)
    assert same(shared(make).eager(**call), expected)


@described
def test_the_padding_contract_holds(make):
    graphed = make().capture()
    for number, lengths in enumerate([[96], [1], [9, 3, 20], [32], [1] * 8, [40, 40, 1, 15]]):
        over_nan, over_leftovers = (call_of(make, lengths, 100, number, fill=fill) for fill in (torch.nan, 7.0))
        graphed.poison()
        first = graphed(**over_nan)
        graphed(**call_of(make, [96], seed=100))
        assert equal_bits(first, graphed(**over_leftovers)), lengths
        assert same(first, packed_one_by_one(over_nan["x"], lengths)), lengths
    assert not graphed.stats.eager


@described
def test_padding_costs_no_rows(make):
    graphed = make()
    assert graphed(**call_of(make, [5, 12, 9], 5000))["rows"].shape == (3, 5000, DIM)
    assert graphed.stats.replays == {PACKED_BUDGETS[0]: 1}
    assert graphed.stats.rows == 26


def test_items_and_masks_come_as_lists_and_tensors_of_any_kind():
    graphed, lengths = shared(packed_encoder), [3, 9]
    x, mask = padded_batch(lengths)
    expected = packed_one_by_one(x, lengths)
    for marks in (mask, mask.int(), mask.tolist(), mask.numpy(), mask.to(torch.uint8)):
        assert same(graphed(x, mask=marks, lengths=torch.tensor(lengths)), expected)
        assert same(graphed(x.double(), mask=marks, lengths=lengths), expected)


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


@described
def test_an_item_larger_than_every_budget_runs_eager_or_is_an_error(make):
    graphed, call = make(), call_of(make, [5, 99, 7])
    assert same(graphed(**call), packed_one_by_one(call["x"], [5, 99, 7]))
    assert graphed.stats.eager == {"larger than every budget": 1}
    assert graphed.stats.replays.total() == 1
    with pytest.raises(vg.errors.BudgetError, match="item 1 is"):
        make(on_miss="error")(**call)


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


@pytest.mark.parametrize(("make", "layout"), [(packed_encoder, [3]), (mask_encoder, [[1, 1]])])
def test_a_stage_has_nothing_to_write_in_place(make, layout):
    with (
        pytest.raises(vg.errors.InputError, match="x comes as a padded batch, which is packed"),
        make().stage(layout),
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

BOTH = {
    "packed rows": ({"x": X[0]}, vg.errors.InputError, "x is [5, 8]: expected [batch, length, 8], a batch of items, each padded"),
    "padding on the left": ({"mask": MASK.flip(1)}, vg.errors.LayoutError, "but not the first 3: expected items padded on the"),
    "another length": ({"mask": MASK[:, :4]}, vg.errors.LayoutError, "mask is [2, 4], but the rows are [2, 5, 8]: expected a mask"),
    "scores": ({"mask": MASK.float()}, vg.errors.LayoutError, "mask is a torch.float32 tensor: expected a key padding mask"),
}  # fmt: skip
WITH_LENGTHS = BOTH | {
    "no mask": ({"mask": None}, vg.errors.InputError, "argument 'mask' is missing: the call needs ['lengths', 'mask', 'x']"),
    "other lengths": (
        {"lengths": [4, 5]}, vg.errors.LayoutError,
        "mask marks [3, 5] rows as real, but lengths describes items of [4, 5] rows: expected the same rows",
    ),
    "another batch": ({"lengths": [3]}, vg.errors.LayoutError, "lengths describes 1 item, the longest of 3 rows, but x is [2, 5"),
    "an item longer than the batch": ({"lengths": [3, 6]}, vg.errors.LayoutError, "the longest of 6 rows, but x is [2, 5, 8]"),
    "fewer items": ({"mask": MASK[1:]}, vg.errors.LayoutError, "mask marks [5] rows as real, but lengths describes items of"),
}  # fmt: skip
MASK_ALONE = BOTH | {
    "no mask": ({"mask": None}, vg.errors.InputError, "argument 'mask' is missing: the call needs ['mask', 'x']"),
    "no real row": ({"mask": MASK & False}, vg.errors.LayoutError, "mask[0] has no rows, while the call has no rows at all"),
    "fewer items": ({"mask": MASK[1:]}, vg.errors.LayoutError, "mask describes 1 item, the longest of 5 rows, but x is [2, 5, 8]"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "change", "error", "message"),
    [(make, *case) for make, calls in ((packed_encoder, WITH_LENGTHS), (mask_encoder, MASK_ALONE)) for case in calls.values()],
    ids=[f"{how}, {name}" for how, calls in (("lengths", WITH_LENGTHS), ("mask", MASK_ALONE)) for name in calls],
)  # fmt: skip
def test_bad_calls_say_what_was_expected(make, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        shared(make)(**call_of(make, [3, 5]) | change)


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


def test_bad_declarations_of_a_mask_alone_say_what_was_expected():
    with pytest.raises(
        vg.errors.SpecError, match=re.escape("but Mask('mask') is the mask of the batch: leave padded_by")
    ):
        mask_encoder(vg.inputs.Rows("x", shape=(DIM,), padded_by="other"))
    with pytest.raises(vg.errors.SpecError, match="leave rows_dim out"):
        mask_encoder(vg.inputs.Rows("x", shape=(1, DIM), rows_dim=1))
    spec = packed_spec(layout=vg.Mask("scale", packed=True), rows=vg.inputs.Rows("x", shape=(DIM,)))
    with pytest.raises(vg.errors.SpecError, match=r"Packed takes 'scale', the mask of a padded batch, but Mask"):
        vg.GraphedEncoder(Packed().eval(), PACKED_BUDGETS, spec)
