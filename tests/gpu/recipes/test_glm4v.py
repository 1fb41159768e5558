"""The towers of GLM on a GPU: the padding contract on real CUDA graphs."""

import copy
from functools import partial

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus, pixels_on_gpu
from tests.support.towers import GLM, distance, glm4v_tower, original_by_frame

pytestmark = on_gpus()

BUDGETS = [
    vg.budgets.Budget(512, items=8, segments=40),
    vg.budgets.Budget(1024, items=8, segments=64),
    vg.budgets.Budget(2048),
]
LAYOUTS = [
    [(1, 32, 64)],  # an item of exactly the largest budget
    [(1, 2, 2)],
    [(1, 14, 14), (1, 8, 20)],
    [(1, 14, 14)] * 8,  # a video as whole models hand it over
    [(8, 14, 14)],  # the same as one item
    [(4, 10, 10), (1, 14, 14), (2, 2, 2)],
    [(40, 2, 2)],  # more frames than items, and all segments of the smallest budget
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", GLM)
def test_the_padding_contract_holds(family, dtype):
    """Heads of 128, as in the 9B tower. In half precision, about as close to float32 as the original's own run."""
    tower = glm4v_tower(dtype=dtype, family=family, hidden_size=512, out_hidden_size=256).to("cuda")
    encoder = vg.recipes.glm4v(tower, BUDGETS)
    original, exact = original_by_frame(tower), original_by_frame(copy.deepcopy(tower).float())

    rows = partial(pixels_on_gpu, dtype=dtype)
    with torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    ):  # the original embeds and merges patches by convolutions
        rounding = max(distance(original(rows(grid), grid), exact(rows(grid), grid)) for grid in LAYOUTS)
        check_padding_contract(encoder, exact, rows, "grid_thw", LAYOUTS, max(1.2 * rounding, 1e-5))
