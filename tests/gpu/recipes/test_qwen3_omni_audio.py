"""The audio tower of Qwen3-Omni on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.towers import qwen3_omni_audio_tower
from varlen_graphs.attention.transformers import use_attention

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_sound(dtype, tolerance):
    tower = qwen3_omni_audio_tower().cuda().to(dtype)

    def original(features, lengths):
        with torch.no_grad(), use_attention(tower):
            return tower(features, feature_lens=torch.tensor(lengths, device="cuda"))

    def frames(lengths, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(16, sum(lengths), device="cuda", generator=generator).to(dtype)

    encoder = vg.recipes.qwen3_omni_audio(tower, [vg.budgets.Budget(512, items=3), vg.budgets.Budget(1024, items=6)])
    layouts = [[1024], [1], [37], [37, 99, 5], [100], [200], [400, 400], [201, 99, 101], [512], [250, 37, 100]]
    check_padding_contract(encoder, original, frames, "feature_lens", layouts, tolerance)
