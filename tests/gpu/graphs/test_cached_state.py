"""What a module keeps of its first rows, on a GPU."""

import copy

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


def test_the_first_call_on_a_gpu_initialises_a_module_as_a_plain_call_does():
    module, rows = Centred().cuda(), rows_for([6], device="cuda")
    alone, encoder = copy.deepcopy(module), encoder_of(module, backend="cuda")
    for lengths in ([6], [9], [30, 20]):
        rows = rows_for(lengths, device="cuda")
        assert distance(encoder(rows, lengths=lengths), alone(rows)) < 1e-5
        assert torch.equal(module.loc, alone.loc)
        assert torch.equal(module.factor, alone.factor)
    assert encoder.stats.replays.total() == 3


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


def test_ids_that_the_module_does_not_have_never_reach_the_gpu():
    spec = vg.BufferSpec(vg.inputs.Rows("ids", shape=(), dtype=torch.int64), vg.Lengths())
    module = Outside().eval()
    encoder = vg.GraphedEncoder(module, [64], spec)
    ids = torch.tensor([1, 2, 3], device="cuda")
    expected = module.tables[0][ids] - module.tables[0][ids].mean(0)
    for _ in range(2):
        assert distance(encoder(ids, lengths=[3]), expected) < 1e-5
    torch.cuda.synchronize()
