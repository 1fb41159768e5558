"""Vision towers that read their grid on the host, on a GPU: the padding contract on real CUDA graphs."""

import copy

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.grid_towers import FAMILIES, beside, grid_tower, original_of, recipe_of, rows_of, taken
from tests.support.towers import distance

pytestmark = on_gpus()

BUDGETS = [vg.budgets.Budget(512, items=8, segments=40), vg.budgets.Budget(2048, items=8, segments=64)]
LAYOUTS = [[(1, 32, 64)], [(1, 2, 2)], [(1, 14, 14), (3, 8, 12), (1, 2, 30)], [(40, 2, 2)], [(1, 8, 8)] * 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_padding_contract_holds(family, dtype):
    """In half precision, about as close to float32 as the original's own run."""
    tower = grid_tower(family, dtype=dtype).to("cuda")
    original, exact = original_of(tower, family), original_of(copy.deepcopy(tower).float(), family)
    rows, layouts = rows_of(family, device="cuda", dtype=dtype), [taken(family, grid) for grid in LAYOUTS]

    def expected(x, grid):
        return exact(x.float(), grid)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # the originals convolve
        rounding = max(distance(original(rows(grid), grid), expected(rows(grid), grid)) for grid in layouts)
        check_padding_contract(
            recipe_of(family)(tower, BUDGETS), expected, rows, "grid_thw", layouts, max(1.3 * rounding, 1e-5),
            more=lambda grid: beside(family, grid, "cuda"),
        )  # fmt: skip
