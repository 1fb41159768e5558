"""Graphs of exactly the size of calls on a GPU, to the bit."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.towers import equal_bits

pytestmark = on_gpus()

LAYOUTS = [[(1, 14, 14)], [(1, 8, 20), (1, 14, 14)], [(3, 6, 8)]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_are_those_of_an_eager_run_to_the_bit(dtype):
    tower = tower_on_gpu(dtype=dtype)
    encoder = vg.recipes.qwen3_vl(tower, [512, 1024], capture=vg.options.Capture(exact=4))
    for layout in LAYOUTS:
        for seed in range(4):
            encoder(pixels_on_gpu(layout, seed, dtype), grid_thw=layout)
    assert len(encoder.capture_pending(None)) == len(LAYOUTS)
    replays = encoder.stats.replays.total()
    for layout in LAYOUTS:
        for seed in range(8):
            pixels = pixels_on_gpu(layout, seed, dtype)
            graphed, eager = encoder(pixels, grid_thw=layout), encoder.eager(pixels, grid_thw=layout)
            assert equal_bits(graphed.pooler_output, eager.pooler_output)
            assert equal_bits(graphed.last_hidden_state, eager.last_hidden_state)
    assert encoder.stats.exact.total() == 24
    assert encoder.stats.replays.total() == replays
