"""Scenarios of groups of processes over NCCL, one GPU each, for tests/gpu/parallel/test_tensor.py."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import varlen_graphs as vg
from tests.gpu.parallel_scenarios import BUDGETS, LAYOUTS, TOLERANCE, check_calls_in_a_row, check_poisoned_padding
from tests.support.encoders import rows_for
from tests.support.gpu import pixels_on_gpu, tower_on_gpu
from tests.support.ranks import check_on_all_ranks, run_scenarios
from tests.support.tensor_scenarios import told
from tests.support.towers import distance

DEADLINE = 5.0
"""Seconds."""

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def mesh():
    return init_device_mesh("cuda", (dist.get_world_size(),))


def towers(dtype=torch.bfloat16, **options):
    """An encoder of a tower on one GPU, and one of it sharded."""
    tower = tower_on_gpu(dtype=torch.float32).to(dtype)
    alone = vg.recipes.qwen3_vl(copy.deepcopy(tower), BUDGETS)
    parallelize_module(tower, mesh(), vg.parallel.tensor_plan(tower))
    return alone, vg.parallel.TensorParallelEncoder(vg.recipes.qwen3_vl(tower, BUDGETS), **options)


def outputs_equal_those_of_one_gpu(rank, ranks):
    alone, both = towers()
    for seed, grid in enumerate(LAYOUTS):
        rows = pixels_on_gpu(grid, seed)
        for grid_thw in (torch.tensor(grid), torch.tensor(grid, device="cuda")):
            check_on_all_ranks(both(rows, grid_thw=grid_thw), alone(rows, grid_thw=grid_thw), TOLERANCE)
    both.check()
    costs = both.encoder.costs.as_json()
    assert both.encoder.costs.measured
    assert told(costs) == [costs] * ranks
    counts = str((both.encoder.stats.replays, both.encoder.stats.eager))
    assert told(counts) == [counts] * ranks


def outputs_in_float32_equal_those_of_one_gpu(rank, ranks):
    alone, both = towers(torch.float32)
    for seed, grid in enumerate(LAYOUTS):
        rows = pixels_on_gpu(grid, seed).float()
        check_on_all_ranks(both(rows, grid_thw=grid), alone(rows, grid_thw=grid), 1e-3)  # attention multiplies in TF32


def calls_in_a_row_do_not_disturb_each_other(rank, ranks):
    _, both = towers()
    both.capture()
    check_calls_in_a_row(both)


def padding_that_holds_nan(rank, ranks):
    _, both = towers()
    both.capture()
    check_poisoned_padding(both.encoder, both)


def other_streams_and_collectives_in_between(rank, ranks):
    alone, both = towers()
    grid = LAYOUTS[0]
    rows = pixels_on_gpu(grid)
    expected = alone(rows, grid_thw=grid)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            check_on_all_ranks(both(rows, grid_thw=grid), expected, TOLERANCE)
        torch.cuda.current_stream().wait_stream(stream)
        total = torch.ones(1000, device="cuda")
        dist.all_reduce(total)
        assert (total == ranks).all()
        check_on_all_ranks(both(rows, grid_thw=grid), expected, TOLERANCE)
        stream.wait_stream(torch.cuda.current_stream())


def graphs_are_freed_and_captured_anew(rank, ranks):
    alone, both = towers()
    grid = LAYOUTS[1]
    rows = pixels_on_gpu(grid)
    for _ in range(2):
        check_on_all_ranks(both(rows, grid_thw=grid), alone(rows, grid_thw=grid), TOLERANCE)
        both.encoder.release()


def outputs_of_a_collective(rank, ranks):
    """Which nothing of the module waits for."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().requires_grad_(False)
    alone = copy.deepcopy(module)
    parallelize_module(module, mesh(), PLAN)
    spec = vg.BufferSpec("input", vg.Lengths())
    both = vg.parallel.TensorParallelEncoder(vg.GraphedEncoder(module, [256, 1024], spec))
    for lengths in ([5], [900, 100], [1024, 1024]):
        rows = rows_for(lengths, 1, 64, "cuda")
        assert distance(both(rows, lengths=lengths), alone(rows)) < 1e-4
    assert not both.encoder.stats.eager.get("forward hooks")


class Fails(nn.Linear):
    """Reads on the host what it computed, for so many rows."""

    rows = ()

    def forward(self, x):
        x = super().forward(x)
        if x.shape[0] in self.rows:
            x.sum().item()
        return x


def failing(rows):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), Fails(64, 64)).cuda()
    module.requires_grad_(False)
    alone = copy.deepcopy(module)
    module[3].rows = rows
    parallelize_module(module, mesh(), PLAN)
    spec = vg.BufferSpec(vg.inputs.Rows("input", shape=(64,)), vg.Lengths())
    return alone, vg.parallel.TensorParallelEncoder(vg.GraphedEncoder(module, [256, 1024], spec))


def a_budget_that_fails_on_one_rank_is_out_of_use_on_all(rank, ranks):
    alone, both = failing((1024,) if rank == 1 else ())
    with pytest.warns(UserWarning, match="graph of 1024 rows could not be captured, and the budget is disabled"):
        both.capture()
    for lengths in ([5], [200, 200], [900]):
        rows = rows_for(lengths, 1, 64, "cuda")
        assert distance(both(rows, lengths=lengths), alone(rows)) < 1e-4


def what_fails_on_one_rank_raises_on_all(rank, ranks):
    _, both = failing((256, 1024) if rank == 1 else ())
    with pytest.raises(vg.errors.CaptureError if rank == 1 else vg.errors.RankError, match="could not be captured"):
        both.capture()


# Ranks that are lost: each in a group of its own


def lose(rank, ranks, before):
    """Make two calls, before the second of which the last rank is lost: others are told within the deadline."""
    _, both = towers(deadline=DEADLINE)
    rows = pixels_on_gpu(LAYOUTS[0])
    for _ in range(2):
        both(rows, grid_thw=LAYOUTS[0])
    both.check()
    if rank == ranks - 1:
        before()
    start = time.perf_counter()
    both(rows, grid_thw=LAYOUTS[0])
    torch.cuda.synchronize()  # which waits until what hangs is ended
    seconds = time.perf_counter() - start
    with pytest.raises(vg.errors.RankError, match="no call ended for 5 s, so the group was aborted"):
        both.check()
    with pytest.raises(vg.errors.RankError, match="end the process"):
        both(rows, grid_thw=LAYOUTS[0])
    assert seconds < 4 * DEADLINE


def a_rank_that_hangs_is_told_on_all(rank, ranks):
    """On the rank that hung too, when it comes back."""
    lose(rank, ranks, lambda: time.sleep(2 * DEADLINE))


def a_rank_that_is_killed_is_told_on_all_others(rank, ranks):
    lose(rank, ranks, lambda: os.kill(os.getpid(), signal.SIGKILL))


SCENARIOS = [
    outputs_equal_those_of_one_gpu,
    outputs_in_float32_equal_those_of_one_gpu,
    calls_in_a_row_do_not_disturb_each_other,
    padding_that_holds_nan,
    other_streams_and_collectives_in_between,
    graphs_are_freed_and_captured_anew,
    outputs_of_a_collective,
    a_budget_that_fails_on_one_rank_is_out_of_use_on_all,
    what_fails_on_one_rank_raises_on_all,
]

LOST = {
    scenario.__name__: scenario
    for scenario in (a_rank_that_hangs_is_told_on_all, a_rank_that_is_killed_is_told_on_all_others)
}
"""Scenarios that need a group of their own."""

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["RANK"]))
    lost = os.environ.get("LOST")
    run_scenarios([LOST[lost]] if lost else SCENARIOS, "nccl")
