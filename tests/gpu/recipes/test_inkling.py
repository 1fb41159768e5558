"""The vision towers of Inkling and Inkling 2 on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.inkling import inkling_tower, original_of, tokens_of
from tests.support.towers import distance

pytestmark = on_gpus()

LAYOUTS = [[(1, 8, 16)], [(1, 1, 1)], [(1, 4, 4), (1, 3, 5), (1, 1, 7)], [(2, 3, 4), (1, 2, 2)], [(1, 1, 1)] * 6]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_the_padding_contract_holds_for_images_with_class_tokens(dtype, tolerance):
    tower = inkling_tower("inkling2", dtype=dtype).cuda()
    encoder = vg.recipes.inkling2(tower, [vg.budgets.Budget(48, items=6), vg.budgets.Budget(128, items=6)])
    rows = tokens_of("cuda", dtype)
    check_padding_contract(encoder, original_of(tower), rows, "image_grid_thw", LAYOUTS, tolerance)


def test_patches_are_a_batch():
    tower = inkling_tower("inkling").cuda()
    calls = [torch.randn(count, 2, 4, 4, 3, device="cuda") for count in (23, 1, 16)]
    with torch.no_grad():
        expected = [tower(x) for x in calls]
        vg.wrap(tower)
        for x, own in zip(calls, expected, strict=True):
            assert distance(tower(x), own) < 2e-3
    assert not vg.encoders(tower)[""].stats.eager
