"""`inputs.Rows(rows_dim=)`: rows that do not lie in the first dimension, as in `[1, rows, dim]` and `[dim, rows]`."""

import re
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.contract import check_padding_contract, check_ways_to_call
from tests.support.encoders import Attention, attention_encoder, attention_spec, original_attention
from tests.support.towers import distance, equal_bits

DIM = 8


class Batched(Attention):
    """Takes `[1, rows, dim]`, and gives that, and one vector for every two rows."""

    def forward(self, x, cu_seqlens, max_seqlen):
        y = super().forward(x.view(-1, DIM), cu_seqlens, max_seqlen)  # a view: the module may count on strides
        return {"states": y[None], "halves": y.unflatten(0, (-1, 2)).sum(1)[None]}


class Channels(Attention):
    """Takes `[dim, rows]`, and gives that, one vector for every two rows, and the first row of each item."""

    def forward(self, x, cu_seqlens, max_seqlen, starts=None):
        y = super().forward(x.view(-1).view(DIM, -1).mT, cu_seqlens, max_seqlen)
        halves = y.unflatten(0, (-1, 2)).sum(1)
        starts = cu_seqlens[:-1] if starts is None else starts.clamp(max=len(y) - 1)
        return {"states": y.mT, "halves": halves.mT, "first": y[starts].mT}


class Middle(Attention):
    """Takes and gives `[2, rows, 1, 4]`: a dimension before the rows, and two after them."""

    def forward(self, x, cu_seqlens, max_seqlen):
        y = super().forward(x.movedim(1, 0).reshape(-1, DIM), cu_seqlens, max_seqlen)
        return {"states": y.view(-1, 2, 1, 4).movedim(0, 1)}


STATES = {"states": vg.outputs.Rows(rows_dim=1)}
HALVES = STATES | {"halves": vg.outputs.Rows(every=2, rows_dim=1)}
FIRST = HALVES | {"first": vg.outputs.Items(rows_dim=1)}
KINDS = {Batched: ((1, DIM), HALVES), Channels: ((DIM,), FIRST), Middle: ((2, 1, 4), STATES)}
EVEN = st.lists(st.integers(1, 50).map(lambda n: 2 * n), min_size=1, max_size=12)


def encoder_of_kind(kind, shaped=True, **options):
    shape, outputs = KINDS[kind]
    starts = [vg.buffers.DeviceBuffer("starts", lambda table: table.item_starts)] if kind is Channels else []
    spec = attention_spec(
        rows=vg.inputs.Rows("x", shape=shape if shaped else None, rows_dim=1),
        buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen(), *starts],
        outputs=vg.outputs.Fields(**outputs),
    )
    return attention_encoder(module=kind(), spec=spec, **options)


@cache
def undeclared_shape(kind):
    """Captured once, for all examples of a property."""
    return encoder_of_kind(kind, shaped=False)


def rows_of_kind(kind, lengths, seed=0):
    first, *others = KINDS[kind][0]
    return torch.randn(first, sum(lengths), *others, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_padding_contract_holds(kind):
    layouts = [[64, 64], [2], [4, 60], [64], [2] * 8, [128], [20, 30]]
    encoder = encoder_of_kind(kind)
    check_padding_contract(encoder, original_attention(kind()), partial(rows_of_kind, kind), "lengths", layouts, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(lengths=EVEN, seed=st.integers(0, 3))
def test_any_call_equals_the_original_however_it_is_split(kind, lengths, seed):
    rows, encoder = rows_of_kind(kind, lengths, seed), undeclared_shape(kind)
    got = encoder(rows, lengths=lengths)
    assert distance(got, original_attention(kind())(rows, lengths)) < 1e-5
    assert distance(encoder.eager(rows, lengths=lengths), original_attention(kind())(rows, lengths)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_may_be_staged_cast_or_described_on_the_device(kind):
    encoder, lengths = encoder_of_kind(kind), [20, 36]
    rows = rows_of_kind(kind, lengths)
    expected = check_ways_to_call(encoder, rows, lengths)
    assert equal_bits(encoder(rows.double(), lengths=lengths), expected)
    assert equal_bits(encoder(rows.mT.contiguous().mT, lengths=lengths), expected)
    wrong = encoder(rows, lengths=torch.tensor([20, 34]))
    assert all(tensor.isnan().all() for tensor in wrong.values())
    assert not encoder.stats.eager


def test_a_stage_that_runs_eager_hands_out_rows_of_the_same_shape():
    encoder = encoder_of_kind(Channels, backend="eager")
    rows = rows_of_kind(Channels, [6, 4])
    with encoder.stage([6, 4]) as stage:
        assert stage.rows.shape == rows.shape
        stage.rows.copy_(rows)
    assert distance(stage.output, original_attention(Channels())(rows, [6, 4])) < 1e-5


def test_the_original_gets_its_argument_as_it_came():
    """Where something else than the module is captured, and a hook has to see the module itself."""

    class Doubled(torch.nn.Module):
        def forward(self, x, lengths):
            return x * 2

    spec = vg.BufferSpec(vg.inputs.Rows("x", rows_dim=1), vg.Lengths(), outputs=vg.outputs.Rows(rows_dim=1))
    encoder = vg.GraphedEncoder(Doubled(), [128], spec, forward=lambda module, x: x * 2, backend="tape")
    seen = []
    hook = encoder.module.register_forward_hook(lambda *call: seen.append(call[1:3]), with_kwargs=True)
    x = torch.randn(3, 5)
    encoder(x, lengths=[5])
    encoder(x=x, lengths=[5])
    hook.remove()
    assert seen[0][0][0] is seen[1][1]["x"] is x
    assert [(len(args), [*kwargs]) for args, kwargs in seen] == [(1, ["lengths"]), (0, ["x", "lengths"])]
    assert torch.equal(encoder(x, lengths=[5]), x * 2)


WRONG = {
    "rows first": (torch.zeros(10, DIM), "x is [10, 8]: expected [8, rows], the rows of all items one after another"),
    "too few dimensions": (torch.zeros(DIM), "x is [8]: expected [8, rows], the rows of all items one after another"),
    "a batch": (torch.zeros(1, DIM, 10), "x is [1, 8, 10]: expected [8, rows], the rows"),
    "no tensor": ([1.0], "x is a list: expected a tensor [8, rows]"),
    "another number of rows": (
        torch.zeros(DIM, 9), "lengths describes 2 items of 10 rows in all, but x has 9 rows of shape [8]; pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "message"), WRONG.values(), ids=WRONG.keys())
def test_errors_tell_shapes_as_the_caller_knows_them(rows, message):
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError), match=re.escape(message)):
        encoder_of_kind(Channels)(rows, lengths=[4, 6])


def test_a_shape_that_is_not_declared_is_that_of_the_first_call():
    encoder = encoder_of_kind(Batched, shaped=False)
    with pytest.raises(
        vg.errors.InputError, match=re.escape("x is [8]: expected [any size, rows, any shape], the rows of")
    ):
        encoder(torch.zeros(8), lengths=[8])
    encoder(torch.zeros(1, 4, DIM), lengths=[4])
    with pytest.raises(vg.errors.InputError, match=re.escape("x is [2, 4, 8]: expected [1, rows, 8], as captured")):
        encoder(torch.zeros(2, 4, DIM), lengths=[4])


def test_outputs_declared_in_another_dimension_than_they_have_are_refused():
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(1, DIM), rows_dim=1), outputs=vg.outputs.Rows())
    with pytest.raises(
        vg.errors.SpecError, match=re.escape("an output of shape [1, 32, 8] is declared as Rows(every=1, row")
    ):
        attention_encoder(module=Batched(), spec=spec).capture()


@pytest.mark.parametrize(
    "make",
    [lambda: vg.inputs.Rows("x", rows_dim=-1), lambda: vg.inputs.Rows("x", shape=(8,), rows_dim=2)],
)
def test_dimensions_that_are_not_there_are_refused(make):
    with pytest.raises(
        vg.errors.SpecError, match="expected rows_dim to be at least 0, and at most the dimensions of shape"
    ):
        make()


@pytest.mark.parametrize("make", [lambda: vg.outputs.Rows(rows_dim=-1), lambda: vg.outputs.Items(rows_dim=-1)])
def test_negative_dimensions_of_outputs_are_refused(make):
    with pytest.raises(vg.errors.SpecError, match="rows_dim to be at least 0"):
        make()
