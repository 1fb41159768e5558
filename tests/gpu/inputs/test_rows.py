"""Rows that do not lie in the first dimension, on real CUDA graphs."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.towers import distance

pytestmark = on_gpus()

DIM = 64


def test_rows_behind_a_batch_of_one():
    class Encoder(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    module = Encoder(DIM, DIM).cuda()
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(1, DIM), rows_dim=1), vg.Lengths(), outputs=vg.outputs.Rows(rows_dim=1)
    )
    encoder = vg.GraphedEncoder(module, [64, 128], spec)
    for lengths in ([5, 30], [128], [1], [100, 100]):
        x = torch.randn(1, sum(lengths), DIM, device="cuda")
        with torch.no_grad():
            assert distance(encoder(x, lengths=lengths), module(x)) < 1e-5
        encoder.poison()
