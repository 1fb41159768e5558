"""Padded batches on real CUDA graphs."""

import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.padded import Packed, Transformer, one_by_one, packed_spec, padded_batch

pytestmark = on_gpus()

DIM = 64


def test_padded_batches():
    module = Transformer(DIM, heads=4).cuda().eval()
    layout = vg.Mask("src_key_padding_mask", dtype=torch.bool, real=False)
    budgets = [vg.budgets.Budget.padded(batch, length) for batch in (2, 8) for length in (32, 96)]
    encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.inputs.Rows("x", shape=(DIM,)), layout)).capture()
    for seed, lengths in enumerate(([5, 30], [96] * 8, [1], [90, 3, 40, 40, 7], [20] * 20, [64, 96, 1])):
        x, real = (part.cuda() for part in padded_batch(lengths, seed=seed, dim=DIM))
        padding, expected = ~real, one_by_one(x, lengths, module)
        encoder.poison()
        for mask in (padding, padding.cpu()):
            torch.testing.assert_close(encoder(x, src_key_padding_mask=mask), expected, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager


def test_a_mask_on_the_gpu_costs_one_copy_to_the_host_to_pack_its_batch():
    module = Packed(DIM).cuda().eval()
    spec = packed_spec(vg.inputs.Rows("x", (DIM,)), vg.Mask("mask", optional=True, packed=True))

    def forward(module, x, cu_seqlens, max_seqlen, first, halves):
        return module(x, cu_seqlens, max_seqlen, first, halves)

    encoder = vg.GraphedEncoder(
        module, [vg.budgets.Budget(64, items=4), vg.budgets.Budget(256, items=8)], spec, forward=forward
    )
    encoder.capture()
    for seed, lengths in enumerate(([5, 30], [25] * 8, [1], [90, 3, 40, 40, 7], [64, 96, 1])):
        x, mask = (part.cuda() for part in padded_batch(lengths, seed=seed, dim=DIM))
        encoder.poison()
        expected = encoder.eager(x, mask=mask)
        encoder(x, mask=mask)  # the first call of each graph is compared with the module
        for marks in (mask, mask.cpu()):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                out = encoder(x, mask=marks)
                torch.cuda.synchronize()
            copies = sum(event.count for event in profile.key_averages() if "Memcpy DtoH" in event.key)
            assert copies == (marks is mask), lengths
            torch.testing.assert_close(dict(out), dict(expected), rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager
