"""Towers without a recipe on a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import varlen_graphs as vg
from benchmarks.generic import BUDGETS, build, rows_for
from tests.support.gpu import on_gpus
from tests.support.towers import distance, equal_bits

pytestmark = on_gpus()

GRIDS = [[(1, 16, 32)], [(1, 4, 4)], [(2, 8, 12), (2, 4, 4)], [(1, 8, 12), (1, 4, 20)]]
CLIPS = [[512], [3], [37, 99, 5], [101, 99, 200]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["GlmOcrVisionModel", "Kimi_K25VisionModel", "PaddleOCRVisionModel", "Qwen2_5OmniAudioEncoder"]
)
def test_replays_over_nan_equal_the_tower(name, dtype):
    tower = build(name, dtype=dtype).cuda()
    encoder = vg.recipes.generic(tower, BUDGETS).capture()
    names = encoder.spec.row_input.name, encoder.spec.layout.name
    for seed, items in enumerate(CLIPS if "Audio" in name else GRIDS):
        rows = rows_for(encoder, items, seed).cuda().to(dtype)
        encoder.poison()
        over_nan = encoder(**dict(zip(names, (rows, items), strict=True)))
        again = encoder(**dict(zip(names, (rows, items), strict=True)))
        with torch.no_grad():
            expected = tower(**dict(zip(names, (rows, torch.tensor(items, device="cuda")), strict=True)))
        assert distance(over_nan, expected) < (1e-4 if dtype == torch.float32 else 3e-2)
        assert equal_bits(over_nan, again)
    encoder.check()


def test_another_thread_runs_the_tower_with_its_own_attention_during_captures():
    tower = build("GlmOcrVisionModel").cuda().eval()
    encoder = vg.recipes.generic(tower, BUDGETS)
    name, before = tower.config._attn_implementation, dict(vars(tower.config))
    seen, stop = set(), threading.Event()

    def watch():
        while not stop.wait(5e-4):  # a loop without a pause would starve the captures of the interpreter's lock
            seen.add(tower.config._attn_implementation)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for seed in range(3):
                encoder.capture()
                rows = rows_for(encoder, GRIDS[0], seed).cuda()
                encoder(rows, grid_thw=GRIDS[0])
                encoder.eager(rows, grid_thw=GRIDS[0])
                encoder.release()
        finally:
            stop.set()
        watching.result()
    assert seen == {name}
    assert dict(vars(tower.config)) == before
    assert not encoder.disabled
