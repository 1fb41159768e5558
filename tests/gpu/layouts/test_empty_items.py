"""Items of no rows in tensors on the GPU, which the host does not see: empty segments, on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.empty_items import WITH_EMPTY, check_empty_segments
from tests.support.gpu import on_gpus
from tests.support.towers import distance, pixels, qwen2_tower

pytestmark = on_gpus()


@pytest.mark.parametrize("lengths", WITH_EMPTY, ids=str)
def test_an_item_of_no_rows_is_an_empty_segment_on_the_host_and_on_the_gpu(lengths):
    check_empty_segments(lengths, device="cuda")


def test_an_image_of_no_patches_changes_nothing():
    tower = qwen2_tower(family="qwen2_5_vl").cuda()
    encoder = vg.recipes.qwen2_5_vl(tower, [vg.budgets.Budget(64, items=4, segments=32)])
    grid = torch.tensor([(1, 4, 4), (0, 0, 0), (1, 2, 6), (0, 2, 2)])
    rows = pixels([(1, 4, 4), (1, 2, 6)], device="cuda")
    with torch.no_grad():
        expected = tower(rows, grid_thw=torch.tensor([(1, 4, 4), (1, 2, 6)], device="cuda"))
    assert distance(encoder(rows, grid_thw=grid.cuda()), expected) < 2e-3
    encoder.check()
    assert not encoder.stats.eager
    assert distance(encoder(rows, grid_thw=grid), expected) < 2e-3
    assert encoder.stats.eager == {"an item has no rows": 1}


def test_bad_items_in_a_tensor_on_the_cpu_raise_at_once():
    encoder = vg.GraphedEncoder(
        torch.nn.Linear(8, 8).cuda(), [64], vg.BufferSpec("input", vg.Lengths(), outputs=vg.outputs.Rows())
    )
    with pytest.raises(
        vg.errors.LayoutError, match="lengths describes 2 items of 11 rows in all, but input has 10 rows"
    ):
        encoder(torch.ones(10, 8, device="cuda"), lengths=torch.tensor([6, 5]))
