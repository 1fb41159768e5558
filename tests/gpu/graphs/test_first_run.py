"""What a module keeps of its first rows, on a GPU."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.gpu import on_gpus
from tests.support.towers import distance

pytestmark = on_gpus()


class Centred(nn.Module):
    """Fills a parameter and a buffer from its first rows, and a cache by size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.loc = nn.Parameter(torch.zeros(8))
        self.register_buffer("factor", torch.ones(()))
        self.ready, self.tables = False, {}
        self.requires_grad_(False)

    def forward(self, x):
        if not self.ready:
            self.loc.data.copy_(x.mean(0))
            self.factor.copy_(x.std())
            self.ready = True
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(8, device=x.device).float()
        return self.linear((x - self.loc) / self.factor) + self.tables[len(x)]


def test_first_rows_on_a_gpu_are_refused_by_name_and_undone():
    encoder = encoder_of(Centred().cuda(), backend="cuda")
    module, rows = encoder.module, rows_for([6], device="cuda")
    with pytest.raises(vg.CaptureError, match="keeps what it computes from rows in 'factor', 'loc': captures"):
        encoder(rows, lengths=[6])
    assert not module.ready
    assert not module.loc.any()
    assert module.factor == 1
    expected = encoder.eager(rows, lengths=[6])
    assert distance(encoder(rows, lengths=[6]), expected) < 1e-5
    assert encoder.stats.replays.total() == 1
    assert torch.equal(module.loc, rows.mean(0))
