"""Rows that graphs copy out of the caller's memory: every form of them that a call may bring, through the public face."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import BUDGETS, attention_encoder, encoder_of, rows_for
from tests.support.row_copies import forms_of

LENGTHS = [5, 9, 7]


class Two(nn.Module):
    """Rows, and rows plus one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.eval()

    def forward(self, x):
        x = x * self.scale
        return [x, x + 1]


@pytest.mark.parametrize("form", forms_of(torch.ones(2, 8)))
def test_rows_in_memory_of_any_kind_are_taken(form):
    encoder, plain = attention_encoder(), rows_for(LENGTHS)
    rows = forms_of(plain)[form]
    for _ in range(2):
        got = encoder(rows, lengths=LENGTHS)
        torch.testing.assert_close(got, encoder.eager(rows.to(torch.float32), lengths=LENGTHS), atol=1e-5, rtol=1e-5)
    assert not encoder.stats.eager


@pytest.mark.parametrize("first", [0, 3])
def test_zeros_without_memory_are_rows(first):
    encoder = encoder_of(Two())
    got = encoder(torch._efficientzerotensor((30, 8))[first : first + 21], lengths=LENGTHS)
    assert torch.equal(got[1], torch.ones(21, 8))


@pytest.mark.parametrize("first", [0, 3])
def test_rows_whose_memory_was_freed_are_refused(first):
    encoder, rows = encoder_of(Two()), torch.ones(30, 8)[first : first + 21]
    assert torch.equal(encoder(rows, lengths=LENGTHS)[0], torch.ones(21, 8))
    rows.untyped_storage().resize_(0)
    with pytest.raises(vg.errors.InputError, match="memory of the rows was freed"):
        encoder(rows, lengths=LENGTHS)


class Beside(nn.Module):
    """Rows plus a number that the host computes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.eval()

    def forward(self, x, number):
        return x * self.scale + number


def test_rows_that_get_other_memory_during_a_call_are_those_that_came():
    actions = []

    def number(layout):
        for act in actions:
            act()
        return torch.zeros(1)

    encoder = encoder_of(Beside(), [vg.buffers.HostBuffer("number", number, (1,), torch.float32)])
    encoder(rows_for(LENGTHS, 1), lengths=LENGTHS)
    rows, others = rows_for(LENGTHS), []
    expected = rows.clone()

    def take_memory():
        rows.data = torch.empty(0)
        others.extend(torch.full((21, 8), 7.0) for _ in range(50))

    actions.append(take_memory)
    assert torch.equal(encoder(rows, lengths=LENGTHS), expected)


@pytest.fixture(scope="module")
def encoder():
    """An encoder for all examples of a property."""
    return encoder_of(Two())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_any_call_is_right_however_it_is_split(encoder, lengths, seed):
    rows = rows_for(lengths, seed)
    first = encoder(rows, lengths=lengths)
    own = [output.clone() for output in first]
    encoder(-rows, lengths=lengths)  # writes into the same static memory
    encoder(rows_for([3]), lengths=[3])
    for output, before, i in zip(first, own, range(2), strict=True):
        assert torch.equal(output, before)
        assert torch.equal(output, rows + i)


def test_a_later_replay_reads_no_rows_of_an_earlier_call():
    """Each load says anew where rows lie: a sample, or what a stage writes, is not overwritten by them."""
    encoder = encoder_of(Two())
    rows = rows_for(LENGTHS)
    encoder(rows, lengths=LENGTHS)
    with encoder.stage(LENGTHS) as stage:
        stage.rows.fill_(2)
        assert (stage.output[0] == 2).all()
    encoder(rows, lengths=LENGTHS)
    assert (encoder(torch.full((22, 8), 3.0)[1:], lengths=torch.tensor(LENGTHS))[0] == 3).all()
    assert torch.equal(encoder(rows.double(), lengths=LENGTHS)[0], rows)  # cast, so copied ahead of the graph


def test_rows_may_be_changed_or_dropped_once_the_call_is_back():
    encoder = encoder_of(Two())
    rows = rows_for(LENGTHS)
    expected = rows.clone()
    got = encoder(rows, lengths=LENGTHS)
    rows.zero_()
    del rows
    assert torch.equal(got[0], expected)


def test_the_graph_of_every_budget_takes_all_of_its_rows():
    encoder = encoder_of(Two()).capture()
    for budget in BUDGETS:
        rows = rows_for([budget.rows])
        assert torch.equal(encoder(rows, lengths=[budget.rows])[1], rows + 1)
    assert encoder.stats.replays.keys() == {*BUDGETS}


def test_rows_in_the_memory_of_the_graph_are_refused_where_they_overlap():
    encoder = encoder_of(Two())
    encoder(rows_for(LENGTHS), lengths=LENGTHS)
    with encoder.stage(LENGTHS) as stage:
        stage.rows.copy_(rows_for(LENGTHS))
        kept = stage.rows
    expected = kept.clone()
    assert torch.equal(encoder(kept, lengths=LENGTHS)[0], expected)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        encoder(kept[2:], lengths=[19])


class Turned(nn.Module):
    """Complex rows, turned."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1j))
        self.eval()

    def forward(self, x):
        return x * self.scale


def test_complex_rows_are_conjugated_where_they_are_in_name_alone():
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,), torch.complex64), vg.Lengths())
    encoder = vg.GraphedEncoder(Turned(), BUDGETS, spec, backend="tape")
    rows = torch.complex(rows_for(LENGTHS, 1), rows_for(LENGTHS, 2))
    for came in (rows, rows.conj()):
        assert torch.equal(encoder(came, lengths=LENGTHS), came * 1j)
    assert not encoder.stats.eager


@pytest.mark.parametrize(("dtype", "shape"), [(torch.int64, ()), (torch.int32, ()), (torch.int32, (2,))])
def test_rows_of_integers_are_taken(dtype, shape):
    module = nn.Embedding(50, 4).eval()
    spec = vg.BufferSpec(vg.inputs.Rows("input", shape, dtype, pad=1), vg.Lengths())
    encoder = vg.GraphedEncoder(module, BUDGETS, spec, backend="tape")
    for seed in range(3):
        ids = torch.randint(50, (21, *shape), dtype=dtype, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(encoder(ids, lengths=LENGTHS), module(ids))
