"""The vision tower of Idefics 2 on real CUDA graphs: padded tiles that are packed on their way in."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.pictures import TINY, build, patch_mask, pictures

pytestmark = on_gpus()

VISION = {name: value for name, value in TINY.items() if name != "head_dim"}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_tiles_that_are_packed_on_their_way_in(dtype, tolerance):
    tower = build("idefics2", "Idefics2VisionConfig", "Idefics2VisionTransformer", **VISION).cuda().to(dtype)

    def rows(mask, seed=0):
        sizes = [(int(own[:, 0].sum()), int(own[0].sum())) for own in mask]
        return pictures(sizes, seed, device="cuda").to(dtype)

    def original(x, mask):
        with torch.no_grad():
            output = tower(x.nan_to_num(), patch_attention_mask=mask)
        output.last_hidden_state *= mask.flatten(1)[..., None]
        return output

    encoder = vg.recipes.idefics(tower, [vg.budgets.Budget(128, items=6), vg.budgets.Budget(256, items=6)])
    layouts = [[(16, 16)], [(1, 2)], [(8, 6), (3, 5), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 60), (5, 13)]]
    masks = [patch_mask(sizes).cuda() for sizes in layouts]
    check_padding_contract(encoder, original, rows, "patch_attention_mask", masks, tolerance)
