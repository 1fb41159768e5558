"""Pixtral's vision tower on real CUDA graphs: pictures that are packed on their way in."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.pictures import TINY, build, pictures, pixels

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_pictures_that_are_packed_on_their_way_in(dtype, tolerance):
    tower = build("pixtral", "PixtralVisionConfig", "PixtralVisionModel", **TINY).cuda().to(dtype)

    def rows(sizes, seed=0):
        return pictures([(h // 4, w // 4) for h, w in sizes], seed, device="cuda").to(dtype)

    def original(x, sizes):
        with torch.no_grad():
            return tower(x.nan_to_num(), image_sizes=torch.tensor(sizes, device="cuda"))

    encoder = vg.recipes.pixtral(tower, [vg.budgets.Budget(128, items=6), vg.budgets.Budget(256, items=6)])
    layouts = [[(16, 16)], [(1, 2)], [(8, 6), (3, 5), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 16), (5, 13)]]
    layouts = [pixels(sizes).tolist() for sizes in layouts]
    check_padding_contract(encoder, original, rows, "image_sizes", layouts, tolerance)
