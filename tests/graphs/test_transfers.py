"""Rows and outputs that graphs copy themselves: every form of them that a call may bring, through the public face."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.encoders import BUDGETS, attention_encoder, encoder_of, rows_for

LENGTHS = [5, 9, 7]


class Wide(nn.Module):
    """Several outputs of rows: some contiguous, one of an odd width, one of integers."""

    def __init__(self, outputs=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.outputs = outputs
        self.eval()

    def forward(self, x):
        x = x * self.scale
        return [x + i for i in range(self.outputs)]


class Mixed(nn.Module):
    """Outputs that a graph cannot hand over as they are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.eval()

    def forward(self, x):
        x = x * self.scale
        return x, x[:, :3].to(torch.bfloat16), x.t().contiguous().t(), (x > 0).sum(1)


def memory_of(encoder):
    """Return the addresses of all that graphs read and write."""
    return [
        tensor.untyped_storage().data_ptr()
        for graphs in encoder.executor.store.sets
        for graph in graphs
        for tensor in (*graphs.arena.memory, *graph.outputs)
    ]


def forms_of(rows):
    """Return the rows in memory of every kind."""
    zeros = torch.zeros(len(rows), 8)
    beside = torch.cat([zeros[:1].view(-1)[:1], rows.reshape(-1)])[1:].view_as(rows)
    return {
        "as they are": rows,
        "within others": torch.cat([zeros, rows, zeros])[len(rows) : 2 * len(rows)],
        "off the unit": beside,
        "in columns": rows.t().contiguous().t(),
        "of a wider tensor": torch.cat([zeros, rows, zeros], 1)[:, 8:16],
        "negated in memory": torch._neg_view(-rows),
        "double": rows.double(),
        "half": rows.bfloat16().float().bfloat16(),
        "a parameter": nn.Parameter(rows, requires_grad=False),
        "copied when written": torch._lazy_clone(rows),
    }


@pytest.mark.parametrize("form", forms_of(torch.ones(2, 8)))
def test_rows_in_memory_of_any_kind_are_taken(form):
    encoder, plain = attention_encoder(), rows_for(LENGTHS)
    rows = forms_of(plain)[form]
    for _ in range(2):
        got = encoder(rows, lengths=LENGTHS)
        torch.testing.assert_close(got, encoder.eager(rows.to(torch.float32), lengths=LENGTHS), atol=1e-5, rtol=1e-5)
    assert not encoder.stats.eager


def test_zeros_without_memory_are_rows():
    encoder = encoder_of(Wide())
    got = encoder(torch._efficientzerotensor((21, 8)), lengths=LENGTHS)
    assert torch.equal(got[1], torch.ones(21, 8))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_outputs_belong_to_the_caller_however_a_call_is_split(lengths, seed):
    encoder = encoder_of(Wide())
    rows = rows_for(lengths, seed)
    first = encoder(rows, lengths=lengths)
    own = [output.clone() for output in first]
    encoder(-rows, lengths=lengths)  # writes into the same static memory
    encoder(rows_for([3]), lengths=[3])
    for output, before, i in zip(first, own, range(2), strict=True):
        assert torch.equal(output, before)
        assert torch.equal(output, rows + i)
        assert output.untyped_storage().data_ptr() not in memory_of(encoder)
        assert output.is_contiguous()
        assert output.untyped_storage().nbytes() == output.nbytes


@pytest.mark.parametrize("outputs", [1, 15, 16, 40])
def test_any_number_of_outputs_comes_out(outputs):
    encoder = encoder_of(Wide(outputs))
    rows = rows_for(LENGTHS)
    for _ in range(2):
        got = encoder(rows, lengths=LENGTHS)
        assert len(got) == outputs
        for i, output in enumerate(got):
            assert torch.equal(output, rows + i)


def test_outputs_that_no_graph_can_hand_over_are_copied():
    encoder = encoder_of(Mixed())
    rows = rows_for(LENGTHS)
    for got in (encoder(rows, lengths=LENGTHS), encoder(rows, lengths=LENGTHS)):
        for output, expected in zip(got, Mixed()(rows), strict=True):
            assert torch.equal(output, expected)


def test_a_later_replay_leaves_what_it_handed_over_alone():
    """A transfer is made once: a graph that is replayed without a new call writes into nobody's memory."""
    encoder = encoder_of(Wide())
    rows = rows_for(LENGTHS)
    got = encoder(rows, lengths=LENGTHS)
    for output in got:
        output.fill_(7)
    (graphs,) = encoder.executor.store.sets
    for budget in graphs.budgets:
        graphs.replay(budget)
    assert all((output == 7).all() for output in got)


def test_rows_may_be_changed_or_dropped_once_the_call_is_back():
    encoder = encoder_of(Wide())
    rows = rows_for(LENGTHS)
    expected = rows.clone()
    got = encoder(rows, lengths=LENGTHS)
    rows.zero_()
    del rows
    assert torch.equal(got[0], expected)


def test_outputs_under_inference_mode_are_tensors_of_it():
    encoder = encoder_of(Wide())
    with torch.inference_mode():
        assert encoder(rows_for(LENGTHS), lengths=LENGTHS)[0].is_inference()
    assert not encoder(rows_for(LENGTHS), lengths=LENGTHS)[0].is_inference()


def test_staged_and_lent_calls_take_no_copies_that_nobody_asked_for():
    lender = encoder_of(Wide(), outputs="borrowed")
    rows = rows_for(LENGTHS)
    with lender.stage(LENGTHS) as stage:
        stage.rows.copy_(rows)
        assert torch.equal(stage.output[1], rows + 1)
    lent = lender(rows, lengths=LENGTHS)
    assert lent.output[0].untyped_storage().data_ptr() in memory_of(lender)
    assert torch.equal(lent.clone()[1], rows + 1)


def test_a_graph_of_every_budget_has_the_transfers():
    encoder = encoder_of(Wide()).capture()
    for budget in BUDGETS:
        rows = rows_for([budget.rows])
        assert torch.equal(encoder(rows, lengths=[budget.rows])[1], rows + 1)
    assert encoder.stats.replays.keys() == {*BUDGETS}


def test_rows_in_the_memory_of_the_graph_are_refused_where_they_overlap():
    encoder = encoder_of(Wide())
    with encoder.stage(LENGTHS) as stage:
        stage.rows.copy_(rows_for(LENGTHS))
        kept = stage.rows
    expected = kept.clone()
    assert torch.equal(encoder(kept, lengths=LENGTHS)[0], expected)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        encoder(kept[2:], lengths=[19])
