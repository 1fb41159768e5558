"""Traces and plans where graphs are captured: what is measured for them, and what planned budgets then take."""

import math

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import LARGER, on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.segments import relative
from tests.support.towers import equal_bits

pytestmark = on_gpus()

LAYOUTS = [[(1, 14, 14)], [(1, 28, 28)] * 2, [(4, 14, 14), (1, 20, 20)], [(1, 42, 42), (1, 8, 8)], [(1, 64, 64)]]

TOLERANCE = 3e-2
"""Relative L2 of two runs in bfloat16 that round differently, because their matrix products are of other sizes."""


@pytest.fixture(scope="module")
def tower():
    return tower_on_gpu(**LARGER)


def held(tower, budgets):
    """Bytes of the pool and the arena of an encoder with these budgets, and what it measured of them."""
    encoder = vg.recipes.qwen3_vl(tower, budgets)
    encoder(pixels_on_gpu(LAYOUTS[0]), grid_thw=LAYOUTS[0])
    taken = encoder.pool.bytes() + encoder.executor.store.arena.rows.nbytes
    costs = encoder.costs
    encoder.release()
    return taken, costs


def test_what_a_row_takes_is_measured_and_foretells_other_ladders(tower):
    taken, costs = held(tower, vg.Ladder(256, 16_384, step=1.5))
    assert costs.bytes_per_row * 16_384 == pytest.approx(taken)
    for memory in (taken // 2, taken * 3 // 2):
        ladder = vg.Ladder.auto(memory, costs.bytes_per_row)
        assert held(tower, [ladder.max, ladder.max // 2])[0] <= 1.05 * memory


def test_recording_does_not_sync_with_the_host(tower):
    encoder = vg.recipes.qwen3_vl(
        tower, vg.Ladder(256, 4096, step=1.5), layouts=vg.options.GpuLayouts(min_segment_rows=64)
    ).capture()
    grid = torch.tensor(LAYOUTS[1], device="cuda")
    rows = pixels_on_gpu(LAYOUTS[1])
    expected = encoder(rows, grid_thw=grid)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with encoder.record() as trace:
            got = encoder(rows, grid_thw=grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert equal_bits(got, expected)
    ((load, count),) = trace.calls.items()
    assert (load.rows, load.items, load.segments, count) == (2 * 28 * 28, 2, 2 * 28 * 28 // 64, 1)


def test_a_plan_from_measured_costs_is_captured_and_measured(tower):
    encoder = vg.recipes.qwen3_vl(tower, vg.Ladder(256, 4096, step=1.2)).capture()
    with encoder.record() as trace:
        results = [encoder(pixels_on_gpu(grid), grid_thw=grid) for grid in LAYOUTS]
    plan = vg.traffic.plan(trace, max_graphs=3)
    assert plan.measured
    assert plan.memory == pytest.approx(plan.budgets[-1].rows * encoder.costs.bytes_per_row)
    planned = vg.recipes.qwen3_vl(tower, plan).capture()
    for grid, expected in zip(LAYOUTS, results, strict=True):
        got = planned(pixels_on_gpu(grid), grid_thw=grid)
        assert relative(got.pooler_output, expected.pooler_output) <= TOLERANCE
    assert 0 < plan.cost < math.inf  # benchmarks/plan.py holds it against what is then measured
    assert set(plan.replays) <= set(planned.costs.replays)
