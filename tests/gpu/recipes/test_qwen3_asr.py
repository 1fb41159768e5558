"""The audio tower of Qwen3-ASR on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.qwen3_asr import asr_tower, clips
from tests.support.towers import distance, equal_bits

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_the_padding_contract_holds(dtype, tolerance):
    tower = asr_tower(dtype).to("cuda")
    encoder = vg.recipes.qwen3_asr(tower, [vg.budgets.Budget(4, items=3), vg.budgets.Budget(12, items=6)]).capture()
    for lengths in ([1200], [1], [230, 99, 301], [400], [100] * 6, [7, 0, 230]):
        call = clips(lengths, device="cuda", dtype=dtype)
        encoder.poison()
        over_nan = encoder(*call)
        encoder(*clips([1200], seed=9, device="cuda", dtype=dtype))
        assert equal_bits(encoder(*call), over_nan)
        with torch.no_grad():
            assert distance(over_nan, tower(*call)) <= tolerance
    assert not encoder.stats.eager
