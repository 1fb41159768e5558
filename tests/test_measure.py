"""Timing of budgets, on the tape with a clock of our own: what is run, and what becomes of a failure."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.encoders import attention_encoder
from varlen_graphs import measure as timing
from varlen_graphs.costs import Costs


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every timed run takes a millisecond; gives how often something was run between events."""
    timed = []

    def between_events(run, repeats):
        for _ in range(repeats):
            run()
        timed.append(repeats)
        return 1.0

    monkeypatch.setattr(timing, "_between_events", between_events)
    monkeypatch.setattr(timing, "_host_milliseconds", lambda run: (run(), 30.0)[1])
    return timed


def measured(encoder):
    (graphs,) = encoder._captured._graphs.values()
    with torch.no_grad():
        return timing.measure(graphs, encoder._forward, encoder.budgets, {})


def test_a_graph_is_launched_once_before_it_is_timed(clock):
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    costs = measured(encoder)
    assert clock == [1, 4] * 2 * len(encoder.budgets)
    runs = []
    timing._device_milliseconds(lambda: runs.append(1))
    assert len(runs) == 1 + 1 + 4
    assert costs.host == 30.0
    assert set(costs.replays) == set(encoder.budgets)


class WithExtra(nn.Linear):
    def forward(self, x, extra):
        return super().forward(x) + extra.sum()


def test_a_host_buffer_that_refuses_samples_does_not_fail_the_call():
    def extra(layout):
        if max(layout.rows) > 50:
            raise ValueError("no item of mine is so long")
        return torch.ones(len(layout.items))

    spec = vg.BufferSpec("x", vg.Lengths(), [vg.HostBuffer("extra", extra, ("items",), torch.float32)])
    encoder = vg.GraphedEncoder(WithExtra(8, 8), [512, 1024], spec, backend="tape")
    encoder(torch.randn(20, 8), lengths=[20])
    with pytest.warns(UserWarning, match="could not be timed.*no item of mine is so long"):
        costs = measured(encoder)
    assert costs.replays == Costs.in_rows(encoder.budgets).replays
    assert costs.host == float("inf")
