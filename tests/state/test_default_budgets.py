"""Default budgets reach further than the first call: what runs at their capacity write stays in copies of the module."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.segments import relative


class WritesInLongCalls(nn.Module):
    """Writes to a buffer, or replaces it, in calls of more than 300 rows."""

    def __init__(self, write):
        super().__init__()
        self.lin, self.write = nn.Linear(8, 8), write
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scratch", torch.zeros(8))

    def forward(self, x):
        if len(x) > 300:
            self.write(self, x)
        return self.lin(x - self.mean)


def in_place(module, x):
    module.mean.copy_(x.mean(0) + 1)


def by_data(module, x):
    module.mean.data.add_(1)


def anew(module, x):
    module.mean = x.mean(0) + 1


def as_scratch(module, x):
    module.scratch.copy_(x.amax(0))


@pytest.mark.filterwarnings("ignore::UserWarning")  # graphs are refused
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("write", [in_place, by_data, anew, as_scratch])
def test_what_long_runs_write_does_not_reach_the_module(write, ahead):
    module, plain = WritesInLongCalls(write).eval(), WritesInLongCalls(write).eval()
    plain.load_state_dict(module.state_dict())
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, None, spec, backend="tape")
    if ahead:
        encoder.capture()
        assert not module.mean.any()
        assert not module.scratch.any()
    for lengths in ([5], [40, 30], [7], [400], [5], [350, 3], [6]):
        rows = rows_for(lengths)
        got, expected = encoder(rows, lengths=lengths), plain(rows)
        assert relative(got, expected) < 1e-5
        assert write is as_scratch or torch.equal(module.mean, plain.mean)
    if write is as_scratch:
        assert encoder.stats.replays.total() == 7
