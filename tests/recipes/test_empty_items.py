"""Images of no patches, as a batch of prompts of which one has none may have: towers take them, and so do encoders."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import ON_GPU, UNVERIFIED
from tests.support.towers import distance, glm4v_tower, pixels, qwen2_tower, qwen3_vl_tower

TOWERS = {
    "qwen2_vl": (vg.recipes.qwen2_vl, lambda: qwen2_tower(family="qwen2_vl")),
    "qwen2_5_vl": (vg.recipes.qwen2_5_vl, lambda: qwen2_tower(family="qwen2_5_vl")),
    "qwen3_vl": (vg.recipes.qwen3_vl, qwen3_vl_tower),
    "glm4v": (vg.recipes.glm4v, glm4v_tower),
}
BUDGETS = [vg.budgets.Budget(64, items=4, segments=32)]


@pytest.mark.parametrize(("recipe", "make"), TOWERS.values(), ids=TOWERS.keys())
@pytest.mark.parametrize("grid", [[[1, 4, 4], [0, 0, 0]], [[1, 4, 4], [0, 0, 0], [1, 2, 6], [0, 2, 2]]], ids=str)
def test_an_image_of_no_patches_changes_nothing(recipe, make, grid):
    tower = make()
    sound = [item for item in grid if 0 not in item]
    rows = pixels(sound)
    with torch.no_grad():
        expected = tower(rows, grid_thw=torch.tensor(sound))
    encoder = recipe(tower, BUDGETS, backend="tape", layouts=ON_GPU)
    assert distance(encoder(rows, grid_thw=torch.tensor(grid)), expected) < 1e-5  # what the GPU alone sees
    encoder.check()
    assert not encoder.stats.eager
    if recipe is not vg.recipes.glm4v or len(grid) == 2:  # this tower takes the next image's size for an empty one's
        encoder = recipe(tower, BUDGETS, backend="tape", verify=UNVERIFIED)
        for layout in (grid, torch.tensor(grid)):
            assert distance(encoder(rows, grid_thw=layout), expected) < 1e-5
        assert encoder.stats.eager == {"an item has no rows": 2}
