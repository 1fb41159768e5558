"""Scenarios of groups of processes over NCCL, one GPU each, for tests/gpu/parallel/test_data.py."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.gpu import pixels_on_gpu, tower_on_gpu
from tests.support.parallel_scenarios import Before
from tests.support.ranks import TIMEOUT, check_on_all_ranks, run_scenarios, runs_of
from tests.support.towers import equal_bits

BUDGETS = [
    vg.budgets.Budget(512, items=8, segments=40),
    vg.budgets.Budget(1024, items=8, segments=64),
    vg.budgets.Budget(2048),
]

LAYOUTS = [
    [(1, 32, 32)] * 8,
    [(1, 14, 14)],  # one item for all ranks
    [(1, 40, 40), (1, 8, 10), (1, 8, 10)],  # 20 : 1
    [(8, 14, 14), (1, 32, 32), (4, 14, 14), (1, 2, 2), (1, 20, 28)],  # videos among images
    [(1, 64, 40), (1, 14, 14)],  # an item that no budget holds
]

TOLERANCE = 2e-2
"""Relative L2 of two runs in bfloat16 that round differently, because their matrix products are of other sizes."""


def parallel_tower(**options):
    tower = tower_on_gpu(dtype=torch.float32).to(torch.bfloat16)
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS)
    return encoder, vg.parallel.DataParallelEncoder(encoder, **options)


def outputs_equal_those_of_one_gpu(rank, ranks):
    encoder, both = parallel_tower()
    for seed, grid in enumerate(LAYOUTS):
        rows = pixels_on_gpu(grid, seed)
        for grid_thw in (torch.tensor(grid), torch.tensor(grid, device="cuda")):
            check_on_all_ranks(both(rows, grid_thw=grid_thw), encoder(rows, grid_thw=grid_thw), TOLERANCE)
    told = [None] * ranks
    torch.distributed.all_gather_object(told, both.weights)
    assert told == [told[0]] * ranks
    assert told[0].row > 1, told[0]  # rank 0 has measured


def check_calls_in_a_row(both):
    """No call waits for the GPU, so all of these are under way at once."""
    calls = [(pixels_on_gpu(grid, seed), grid) for seed in range(4) for grid in LAYOUTS[:4]]
    apart = []
    for rows, grid in calls:
        apart.append(both(rows, grid_thw=grid).pooler_output.clone())
        torch.cuda.synchronize()
    together = [both(rows, grid_thw=grid).pooler_output for rows, grid in calls]
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def calls_in_a_row_do_not_disturb_each_other(rank, ranks):
    check_calls_in_a_row(parallel_tower()[1])


def check_poisoned_padding(encoder, both):
    for seed, grid in enumerate(LAYOUTS[:4]):
        rows = pixels_on_gpu(grid, seed)
        before = both(rows, grid_thw=grid)
        encoder.poison()
        assert equal_bits(both(rows, grid_thw=grid), before)


def padding_that_holds_nan(rank, ranks):
    check_poisoned_padding(*parallel_tower())


def inputs_that_are_spread(rank, ranks):
    encoder, spread = parallel_tower(inputs="spread")
    grid, runs = runs_of(LAYOUTS[3], ranks)
    rows = pixels_on_gpu(grid)
    own = rows.split([sum(t * h * w for t, h, w in run) for run in runs])[rank]
    check_on_all_ranks(spread(own, grid_thw=runs[rank]), encoder(rows, grid_thw=grid), TOLERANCE)


def a_capture_that_fails_on_one_rank_raises_on_every_rank(rank, ranks):
    class Fails(nn.Linear):
        def forward(self, x):
            if rank == 1:
                x.sum().item()
            return super().forward(x)

    encoder = vg.GraphedEncoder(Fails(8, 8).cuda(), [64], vg.BufferSpec("x", vg.Lengths()))
    with pytest.raises(vg.errors.CaptureError if rank == 1 else vg.errors.RankError):
        vg.parallel.DataParallelEncoder(encoder)(rows_for([5]).cuda(), lengths=[5])


def an_error_while_one_rank_encodes_is_told_to_others(rank, ranks):
    module = Before().cuda()
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths()), backend="eager")
    both, rows, lengths = vg.parallel.DataParallelEncoder(encoder), rows_for([5] * 6).cuda(), [5] * 6
    check_on_all_ranks(both(rows, lengths=lengths), rows)

    def fail():
        raise MemoryError("no memory is left")

    def call():
        assert both(rows, lengths=lengths).isnan().any()  # unless the host knows it by now
        both.check()

    module.before = fail if rank == 1 else lambda: None
    with pytest.raises(MemoryError if rank == 1 else vg.errors.RankError):
        call()
    module.before = lambda: None
    check_on_all_ranks(both(rows, lengths=lengths), rows)
    both.check()


def a_rank_that_is_killed_raises_on_all_others(rank, ranks):
    """With TORCH_NCCL_BLOCKING_WAIT=1, as this group has it; otherwise NCCL's watchdog ends the process."""
    _, both = parallel_tower()
    rows = pixels_on_gpu(LAYOUTS[0])
    both(rows, grid_thw=LAYOUTS[0])
    torch.cuda.synchronize()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    with pytest.raises(vg.errors.RankError, match="a rank of the group did not take part"):
        both(rows, grid_thw=LAYOUTS[0])
    assert time.perf_counter() - start < 2 * TIMEOUT.total_seconds()


SCENARIOS = [
    outputs_equal_those_of_one_gpu,
    calls_in_a_row_do_not_disturb_each_other,
    padding_that_holds_nan,
    inputs_that_are_spread,
    a_capture_that_fails_on_one_rank_raises_on_every_rank,
    an_error_while_one_rank_encodes_is_told_to_others,
]

LOST = [a_rank_that_is_killed_raises_on_all_others]
"""Scenarios that need a group of their own."""

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["RANK"]))
    run_scenarios(LOST if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1" else SCENARIOS, "nccl")
