"""`ReplayTimes` and `measure`: timing of budgets, on the tape with a clock of our own: what is run, and what becomes of a failure."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_encoder
from varlen_graphs.graphs import calibrate as timing
from varlen_graphs.routing.costs import Costs


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every timed run takes a millisecond and the first one two; gives their number."""
    timed = []

    def events_around(run):
        run()
        timed.append(1)
        taken = 1.0 if len(timed) > 1 else 2.0
        return lambda: taken

    monkeypatch.setattr(timing, "events_around", events_around)
    monkeypatch.setattr(timing, "host_milliseconds", lambda run, consensus, times: (run(), 30.0)[1])
    return timed


def measured(encoder):
    (graphs,) = encoder.executor.store.sets
    with torch.no_grad():
        return timing.measure(graphs, encoder.executor.forward, encoder.budgets, 64 << 10, times_of(encoder))


def times_of(encoder):
    (graphs,) = encoder.executor.store.sets
    return timing.ReplayTimes(graphs, encoder.executor.spec)


def test_a_graph_is_launched_once_before_it_is_timed(clock, monkeypatch):
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    (graphs,), replays = encoder.executor.store.sets, []
    own = graphs.replay
    monkeypatch.setattr(graphs, "replay", lambda budget: (replays.append(budget), own(budget))[1])
    costs = measured(encoder)
    most = max(encoder.budgets).rows
    timed = [timing.OF_SHORT if 4 * budget.rows <= most else timing.REPEATS for budget in encoder.budgets]
    assert len(clock) == sum(timed)
    assert len(replays) == sum(timed) + len(timed)
    assert costs.host == 30.0
    assert {*costs.replays.values()} == {1.0}
    assert set(costs.replays) == set(encoder.budgets)
    assert costs.bytes_per_row == (64 << 10) / 128 + 8 * 4  # the pool, and the rows of the arena


def test_budgets_that_come_later_are_timed_alone(clock):
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    first = measured(encoder)
    more = encoder.add_budget(vg.budgets.Budget(96, items=4))
    (graphs,) = encoder.executor.store.sets
    clock.clear()
    with torch.no_grad():
        costs = timing.measure(graphs, encoder.executor.forward, [more], 64 << 10, times_of(encoder), first)
    assert len(clock) == timing.REPEATS
    assert costs.replays == {**first.replays, more: 1.0}
    assert (costs.host, costs.per_square, costs.bytes_per_row) == (30.0, first.per_square, first.bytes_per_row)
    encoder.costs = first
    assert encoder.costs.measured
    assert more in encoder.costs.replays  # at what lies between, until it is timed


def test_what_a_row_takes_is_of_the_largest_graph_there_was(clock):
    """Not of larger budgets that only a warm-up file knows, nor of smaller ones that are timed later."""
    small, large = 128, vg.budgets.Budget(512)
    known = Costs({vg.budgets.Budget(rows): rows / 64 for rows in (small, 16_384)}, host=30.0, bytes_per_row=77.0)
    encoder = attention_encoder([small, large])
    encoder(torch.randn(20, 8), lengths=[20])
    (graphs,) = encoder.executor.store.sets

    def bytes_per_row(budget):
        with torch.no_grad():
            costs = timing.measure(graphs, encoder.executor.forward, [budget], 512 * 1000, times_of(encoder), known)
        assert costs.replays.keys() == known.replays.keys() | {budget}
        return costs.bytes_per_row

    assert bytes_per_row(large) == 1000 + 8 * 4
    more = encoder.add_budget(vg.budgets.Budget(96, items=4))
    assert bytes_per_row(more) == 1000 + 8 * 4
    encoder.drop_budget(large)
    assert bytes_per_row(more) == 1000 + 8 * 4  # pool and arena stay as large


def test_graphs_that_were_timed_as_they_came_are_timed_no_more(clock):
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    (graphs,), times = encoder.executor.store.sets, times_of(encoder)
    with torch.no_grad(), times:
        for budget in encoder.budgets:
            times.queue(budget)
        queued = len(clock)
        costs = timing.measure(graphs, encoder.executor.forward, encoder.budgets, 64 << 10, times)
    assert len(clock) == queued >= timing.REPEATS * len(encoder.budgets)
    assert set(costs.replays) == set(encoder.budgets)


class Positions(nn.Module):
    """A module with a limit of its own, below that of the budget."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)

    def forward(self, x, position_ids):
        return x + self.table(position_ids)


def test_no_item_is_longer_than_those_that_a_capture_ran():
    spec = vg.BufferSpec("x", vg.Lengths(), [vg.buffers.RowPositions()])
    encoder = vg.GraphedEncoder(Positions(), [1024, 4096], spec, backend="tape")
    encoder(torch.randn(20, 8), lengths=[20])
    assert measured(encoder).host == 30.0  # and not what is assumed where timing fails


def test_timing_leaves_random_numbers_alone():
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    measured(encoder)
    assert torch.equal(torch.randn(3), expected)


class WithExtra(nn.Linear):
    def forward(self, x, extra):
        return super().forward(x) + extra.sum()


def test_a_host_buffer_that_refuses_samples_does_not_fail_the_call():
    def extra(layout):
        if max(layout.rows) > 50:
            raise ValueError("no item of mine is so long")
        return torch.ones(len(layout.items))

    spec = vg.BufferSpec("x", vg.Lengths(), [vg.buffers.HostBuffer("extra", extra, ("items",), torch.float32)])
    encoder = vg.GraphedEncoder(WithExtra(8, 8), [512, 1024], spec, backend="tape")
    encoder(torch.randn(20, 8), lengths=[20])
    with pytest.warns(UserWarning, match="could not be timed.*no item of mine is so long"):
        costs = measured(encoder)
    assert costs.replays == Costs.in_rows(encoder.budgets).replays
    assert not costs.measured
