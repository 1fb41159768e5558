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


class Outside(nn.Module):
    """Keeps the mean of the first embeddings, from a table of few ids that nothing registers."""

    def __init__(self):
        super().__init__()
        self.tables, self.mean = [torch.randn(4, 8, device="cuda")], None
        self.scale = nn.Parameter(torch.ones((), device="cuda"), requires_grad=False)

    def forward(self, ids):
        x = self.tables[0][ids] * self.scale
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean


def test_ids_that_the_module_does_not_have_are_refused_before_the_gpu_uses_them():
    spec = vg.BufferSpec(vg.PackedRows("ids", shape=(), dtype=torch.int64), vg.Lengths())
    encoder = vg.GraphedEncoder(Outside().eval(), [64], spec)
    ids = torch.tensor([1, 2, 3], device="cuda")
    with pytest.raises(vg.CaptureError, match="fails if that is undone and it runs again on other rows"):
        encoder(ids, lengths=[3])
    torch.cuda.synchronize()
    assert encoder.module.mean is None
    expected = encoder.eager(ids, lengths=[3])
    assert distance(encoder(ids, lengths=[3]), expected) < 1e-5
