"""The vision tower of Gemma 4 on real CUDA graphs: padded batches of patches that are packed on their way in."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.pictures import GEMMA4, build, patch_positions, position_rows

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_patches_that_are_packed_on_their_way_in(dtype, tolerance):
    tower = build("gemma4", "Gemma4VisionConfig", "Gemma4VisionModel", **GEMMA4).cuda().to(dtype)

    def original(x, positions):
        with torch.no_grad():
            return tower(x.nan_to_num(), positions)

    encoder = vg.recipes.gemma4(tower, [vg.budgets.Budget(128, items=6), vg.budgets.Budget(256, items=6)])
    layouts = [[(16, 16)], [(2, 2)], [(8, 6), (4, 6), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 60), (6, 12)]]
    positions = [patch_positions(sizes).cuda() for sizes in layouts]
    check_padding_contract(encoder, original, position_rows, "pixel_position_ids", positions, tolerance)
