"""C-RADIO on a GPU: packed images and batches on real CUDA graphs."""

from functools import partial

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.radio import patches, radio_original, radio_tower
from tests.support.towers import distance

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
def test_packed_images_and_batches(dtype, tolerance):
    tower = radio_tower(dtype).to("cuda")
    tower.make_preprocessor_external()
    encoder = vg.recipes.radio(tower, [vg.budgets.Budget(128, items=6), vg.budgets.Budget(256, items=6)])
    layouts = [[(16, 16)], [(1, 2)], [(8, 6), (3, 5), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 60), (5, 13)]]
    rows = partial(patches, device="cuda", dtype=dtype)
    check_padding_contract(encoder, radio_original(tower), rows, "image_grid_hw", layouts, tolerance)
    for channels in (3, 6):
        batch = torch.randn(3, channels, 16, 24, device="cuda", dtype=dtype)
        with torch.no_grad():
            assert distance(encoder(batch), tower(batch)) <= tolerance
    assert not encoder.batches.stats.eager
