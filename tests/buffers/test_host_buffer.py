"""Buffers computed on the host, for each call."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.towers import distance


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.linear(x) * scale[0]


def staged(encoder, rows):
    with encoder.stage([6]) as stage:
        stage.rows.copy_(rows)
    return stage.output


def test_a_host_buffer_that_calls_its_own_encoder_is_refused():
    def scale(layout):
        if calls:
            return calls.pop()(rows_for([3]), lengths=[3])[:1, 0]
        return torch.ones(1)

    calls = []
    encoder = encoder_of(Scaled(), [vg.HostBuffer("scale", scale, (1,), torch.float32)])
    rows = rows_for([6])
    expected = encoder(rows, lengths=[6])
    for _ in range(2):
        calls.append(encoder)
        with pytest.raises(
            vg.InputError, match=r"a HostBuffer called the encoder that it is computed for.*another enc"
        ):
            encoder(rows, lengths=[6])
        calls.append(encoder)
        with pytest.raises(vg.InputError, match="a HostBuffer called the encoder"):
            staged(encoder, rows)
        assert distance(encoder(rows, lengths=[6]), expected) == 0


def test_a_host_buffer_may_call_another_encoder_of_the_pool():
    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    first = encoder_of(First(8, 8))

    def scale(layout):
        return first(rows_for([layout.total]), lengths=[layout.total])[:1, 0]

    encoder = encoder_of(Scaled(), [vg.HostBuffer("scale", scale, (1,), torch.float32)], pool=first.pool)
    for seed in range(3):
        rows = rows_for([5 + seed], seed)
        got = encoder(rows, lengths=[5 + seed])
        assert distance(got, encoder.eager(rows, lengths=[5 + seed])) < 1e-6
