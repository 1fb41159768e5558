"""The vision tower of MiniCPM-V 4.6 on real CUDA graphs: strips of patches, positions as the GPU rounds them."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.minicpm46 import original_of, strip_tower, strips_of

pytestmark = on_gpus()

LAYOUTS = [[(32, 32)], [(2, 2)], [(14, 26), (2, 30), (6, 2)], [(22, 46)], [(2, 2)] * 6, [(38, 18), (10, 34)]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_the_padding_contract_holds(dtype, tolerance):
    tower = strip_tower(dtype=dtype).cuda()
    encoder = vg.recipes.minicpmv4_6(tower, [vg.budgets.Budget(256, items=6), vg.budgets.Budget(1024, items=6)])
    check_padding_contract(encoder, original_of(tower), strips_of("cuda", dtype), "target_sizes", LAYOUTS, tolerance)


def test_the_padding_contract_holds_without_merged_windows():
    tower = strip_tower().cuda()
    encoder, run = vg.recipes.minicpmv4_6(tower, [vg.budgets.Budget(1024, items=6)]), original_of(tower)
    check_padding_contract(
        encoder.whole, lambda rows, sizes: run(rows, sizes, use_vit_merger=False), strips_of("cuda"), "target_sizes",
        LAYOUTS, 2e-3,
    )  # fmt: skip
