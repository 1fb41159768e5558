"""The padding contract of Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni on real CUDA graphs, windows included."""

from functools import partial

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus, pixels_on_gpu
from tests.support.towers import QWEN2, distance, original_of, qwen2_recipe, qwen2_tower

pytestmark = on_gpus()

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
BUDGETS = [
    vg.budgets.Budget(512, items=8, segments=40),
    vg.budgets.Budget(1024, items=8, segments=64),
    vg.budgets.Budget(2048, segments=128),
]
LAYOUTS = [
    [(1, 32, 64)],  # an item of exactly the largest budget, whole windows
    [(1, 2, 2)],
    [(1, 14, 14), (1, 10, 20)],  # ragged ones
    [(8, 14, 14)],  # a video
    [(4, 10, 10), (1, 14, 14), (2, 2, 2)],  # both in one call
    [(1, 16, 32)],  # an item of exactly the smallest budget
    [(40, 2, 2)],  # more frames than items, and all segments of the smallest budget
    [(1, 24, 40), (1, 18, 22), (3, 16, 12)],
]


def qwen2_tower_on_gpu(family, dtype, seed=0):
    """Heads of 80, and windows of 8 x 8 patches, as in the real towers."""
    sizes = {"num_heads": 4, "depth": 4}
    sizes |= {"embed_dim": 320} if family == "qwen2_vl" else {"hidden_size": 320, "window_size": 32}
    return qwen2_tower(seed, family=family, **sizes).to("cuda").to(dtype)


def original_without_tf32(tower):
    """Return the original, whose patches are embedded by a convolution: by default one in TF32."""
    original = original_of(tower)

    def run(rows, grid):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return original(rows, grid)

    return run


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("family", QWEN2)
def test_the_padding_contract_holds(family, dtype):
    tower = qwen2_tower_on_gpu(family, dtype)
    tower.rotary_pos_emb.float()  # .to(dtype) cast the frequencies; the original computes them in float32
    encoder, rows = qwen2_recipe(tower)(tower, BUDGETS), partial(pixels_on_gpu, dtype=dtype)
    check_padding_contract(encoder, original_without_tf32(tower), rows, "grid_thw", LAYOUTS, LIMIT[dtype])


def test_compiled_code_keeps_it():
    tower = qwen2_tower_on_gpu("qwen2_5_vl", torch.bfloat16)
    tower.rotary_pos_emb.float()
    encoder = qwen2_recipe(tower)(tower, BUDGETS, capture=vg.options.Capture(compile=True))
    check_padding_contract(
        encoder, original_without_tf32(tower), pixels_on_gpu, "grid_thw", LAYOUTS, LIMIT[torch.bfloat16]
    )


def test_windows_that_only_the_gpu_has_seen():
    tower = qwen2_tower_on_gpu("qwen2_5_vl", torch.float32)
    encoder = qwen2_recipe(tower)(tower, BUDGETS, layouts=vg.options.GpuLayouts(min_segment_rows=16))
    for grid in LAYOUTS[2:5]:
        rows, on_gpu = pixels_on_gpu(grid, dtype=torch.float32), torch.tensor(grid, device="cuda")
        assert distance(encoder(rows, grid_thw=on_gpu), original_without_tf32(tower)(rows, grid)) < 1e-5
    encoder.check()
    broken = [(256, 2, 4)]  # eight rows a window
    rows, on_gpu = pixels_on_gpu(broken, dtype=torch.float32), torch.tensor(broken, device="cuda")
    assert encoder(rows, grid_thw=on_gpu)[0].isnan().all()
    with pytest.raises(vg.errors.LayoutError, match="describes 256 segments, more than the 128 of the budget"):
        encoder.check()
