"""Padded batches on real CUDA graphs."""

import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.padded import Transformer, one_by_one, padded_batch

pytestmark = on_gpus()

DIM = 64


def test_padded_batches():
    module = Transformer(DIM, heads=4).cuda().eval()
    layout = vg.PaddedMask("src_key_padding_mask", dtype=torch.bool, real=False)
    budgets = [vg.Budget.padded(batch, length) for batch in (2, 8) for length in (32, 96)]
    encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.PackedRows("x", shape=(DIM,)), layout)).capture()
    for seed, lengths in enumerate(([5, 30], [96] * 8, [1], [90, 3, 40, 40, 7], [20] * 20, [64, 96, 1])):
        x, real = (part.cuda() for part in padded_batch(lengths, seed=seed, dim=DIM))
        padding, expected = ~real, one_by_one(x, lengths, module)
        encoder.poison()
        for mask in (padding, padding.cpu()):
            torch.testing.assert_close(encoder(x, src_key_padding_mask=mask), expected, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager
