"""Batches of items of one size on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.batches import SPEC, FixedSize, check_batch_contract, images
from tests.support.gpu import on_gpus
from tests.support.towers import distance

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_the_padding_contract_holds(dtype, tolerance):
    module = FixedSize().to("cuda", dtype)
    encoder = vg.GraphedEncoder(module, [1, 2, 4, 8], SPEC, verify=vg.options.Verify(strict=True))
    check_batch_contract(encoder, "cuda", tolerance, dtype)


def test_resolutions_have_graphs_of_their_own():
    encoder = vg.GraphedEncoder(FixedSize().cuda(), [1, 2, 4, 8], SPEC)
    for count, side in ((3, 16), (5, 8), (20, 16), (1, 8)):
        x = images(count, side, device="cuda")
        encoder(x)
        encoder.poison()
        assert distance(encoder(x), encoder.module(x)) < 1e-3
    assert len(encoder.executor.store.sets) == 2
    assert not encoder.stats.eager
