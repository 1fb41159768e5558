"""Scenarios of groups of processes over gloo, for tests/parallel/test_tensor.py."""

import copy
import datetime
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import varlen_graphs as vg
from tests.support.encoders import BUDGETS, SIMULATED, UNVERIFIED, attention_spec, rows_for
from tests.support.ranks import TIMEOUT, check_on_all_ranks, fork_groups
from tests.support.towers import equal_bits, glm4v_tower, pixels, qwen3_vl_tower
from varlen_graphs.routing.costs import Costs

DIM, HEADS = 24, 6
"""Heads that 2 and 3 ranks can share."""

LENGTHS = [
    [5],
    [3, 60, 4, 20],
    [60] * 5,  # several replays
    [300, 3],  # an item that no budget holds
    [1, 2, 3, 4, 5, 6, 7],
    [64, 64],
]

GRIDS = [
    [(1, 8, 8)],
    [(1, 6, 4), (3, 2, 4), (1, 8, 10), (2, 4, 4), (1, 2, 2)],
    [(3, 4, 6), (1, 6, 6)],
    [(1, 12, 14), (1, 4, 4)],  # an item that no budget holds
]


class Block(nn.Module):
    """Attention with a projection each for queries, keys and values, and an MLP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        q, k, v = (part(x).unflatten(-1, (-1, DIM // HEADS)) for part in (self.query, self.key, self.value))
        x = x + scale * self.out(vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1))
        return x + self.down(self.up(self.norm(x)).relu())


SPEC = attention_spec(rows=vg.inputs.Rows("x", shape=(DIM,)))

PLAN = {
    **{name: ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def encoders(module=None, budgets=BUDGETS, **options):
    """An encoder of a module, on one rank, and one of the module sharded."""
    module = Block() if module is None else module
    alone = vg.GraphedEncoder(copy.deepcopy(module), budgets, SPEC, verify=UNVERIFIED, **SIMULATED)
    parallelize_module(module, mesh(), PLAN)
    encoder = vg.GraphedEncoder(module, budgets, SPEC, **SIMULATED | options)
    return alone, vg.parallel.TensorParallelEncoder(encoder)


def linears(plan, mesh):
    """Two linear layers on one rank, and an encoder of them sharded."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
    alone = copy.deepcopy(module).requires_grad_(False)
    parallelize_module(module, mesh, plan)
    spec = vg.BufferSpec(vg.inputs.Rows("input", shape=(DIM,)), vg.Lengths())
    return alone, vg.parallel.TensorParallelEncoder(vg.GraphedEncoder(module, [64], spec, backend="tape"))


def told(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Results


def any_lengths(rank, ranks):
    alone, both = encoders(verify=UNVERIFIED)
    for seed, lengths in enumerate(LENGTHS):
        rows = rows_for(lengths, seed, dim=DIM)
        for scale in (1.0, 0.5):  # other graphs
            expected = alone(rows, lengths=lengths, scale=scale)
            check_on_all_ranks(both(rows, lengths=torch.tensor(lengths), scale=scale), expected)
    assert both.encoder.stats.eager == {"larger than every budget": 2}
    both.check()


def any_call_equals_that_of_one_rank(rank, ranks):
    """Derandomized, so that all ranks draw the same calls; not shrunk, which they would do apart."""
    alone, both = encoders(verify=UNVERIFIED)

    @settings(max_examples=12, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(st.lists(st.integers(1, 150), min_size=1, max_size=12))
    def compare(lengths):
        rows = rows_for(lengths, dim=DIM)
        check_on_all_ranks(both(rows, lengths=lengths), alone(rows, lengths=lengths))

    compare()


def a_tower(rank, ranks):
    compare_towers(qwen3_vl_tower(num_heads=6, hidden_size=96, intermediate_size=192), vg.recipes.qwen3_vl)


def other_towers(rank, ranks):
    sizes = {"num_heads": 6, "hidden_size": 96}
    images = [[item for item in grid if item[0] == 1] for grid in GRIDS[1:]]
    tower = glm4v_tower(intermediate_size=192, out_hidden_size=192, **sizes)
    compare_towers(tower, vg.recipes.glm4v, images, verify=UNVERIFIED)


def compare_towers(tower, recipe, grids=GRIDS, **options):
    alone = copy.deepcopy(tower)
    parallelize_module(tower, mesh(), vg.parallel.tensor_plan(tower))
    encoder = recipe(tower, [vg.budgets.Budget(128, items=4, segments=16)], **SIMULATED, **options)
    both = vg.parallel.TensorParallelEncoder(encoder)
    for seed, grid in enumerate(grids):
        rows, grid_thw = pixels(grid, seed), torch.tensor(grid)
        with torch.no_grad():
            expected = alone(rows, grid_thw=grid_thw)
        check_on_all_ranks(both(rows, grid_thw=grid_thw), expected, 2e-5)
        with torch.no_grad():
            check_on_all_ranks(tower(rows, grid_thw=grid_thw), expected, 2e-5)  # the tower itself is sharded as well
    assert encoder.stats.eager == {"larger than every budget": 1}
    hidden = both(rows, grid_thw=grid_thw, output_hidden_states=True)
    with torch.no_grad():
        check_on_all_ranks(hidden, alone(rows, grid_thw=grid_thw, output_hidden_states=True), 2e-5)


def padding_that_holds_nan(rank, ranks):
    _, both = encoders(verify=UNVERIFIED)
    rows = rows_for([7, 30, 11], dim=DIM)
    before = both(rows, lengths=[7, 30, 11])
    both.encoder.poison()
    assert equal_bits(both(rows, lengths=[7, 30, 11]), before)


def graphs_are_proven(rank, ranks):
    _, both = encoders()
    both.capture()
    assert both.encoder.verify([{"x": rows_for([40, 20], dim=DIM), "lengths": [40, 20]}])


def outputs_and_weights_that_are_gathered(rank, ranks):
    """A reduction that nothing follows, and one of another kind."""
    for plan in (
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel(output_layouts=Replicate())},
        {"0": RowwiseParallel(input_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())},
    ):
        alone, both = linears(plan, mesh())
        for lengths in ([5], [60], [9, 1, 30]):
            rows = rows_for(lengths, dim=DIM)
            check_on_all_ranks(both(rows, lengths=lengths), alone(rows))
        assert not both.encoder.stats.eager


def weights_that_change_in_place(rank, ranks):
    alone, both = encoders(verify=UNVERIFIED)
    rows = rows_for([5, 6], dim=DIM)
    before = both(rows, lengths=[5, 6])
    with torch.no_grad():
        for module in (alone.module, both.module):
            module.up.weight.mul_(2.0)
    after = both(rows, lengths=[5, 6])
    check_on_all_ranks(after, alone(rows, lengths=[5, 6]))
    assert not equal_bits(after, before)


def shards_that_move_are_found(rank, ranks):
    _, both = encoders(verify=UNVERIFIED)
    rows = rows_for([5, 6], dim=DIM)
    expected = both(rows, lengths=[5, 6])
    both.module.up.weight._local_tensor = both.module.up.weight._local_tensor.clone()
    with pytest.raises(vg.errors.StaleGraphError, match=r"'up\.weight' was moved"):
        both.check()
    both.encoder.release()
    check_on_all_ranks(both(rows, lengths=[5, 6]), expected)


def hooks_of_others_run_eager(rank, ranks):
    alone, both = encoders()
    seen = []
    both.module.up.register_forward_hook(lambda *_: seen.append(1))
    rows = rows_for([5, 6], dim=DIM)
    check_on_all_ranks(both(rows, lengths=[5, 6]), alone(rows, lengths=[5, 6]))
    assert len(seen) == both.encoder.stats.eager["forward hooks"] == 1


# Agreement


def ranks_plan_by_what_rank_0_measured(rank, ranks):
    def learn(encoder):
        slower = (1.0, 100.0, 0.01)[rank]  # rank 1 would split calls, or run them without a graph
        encoder.costs = Costs({b: slower**i * b.rows for i, b in enumerate(BUDGETS)}, 1e-9, host=50.0 / slower)

    alone, both = encoders(verify=UNVERIFIED)
    learn(both.encoder)
    both.capture()
    assert told(both.encoder.costs.as_json()) == [both.encoder.costs.as_json()] * ranks
    calls = [[5], [60, 60], [60, 60, 60], [1] * 7, [100, 3, 100, 3]]
    for lengths in calls:
        check_on_all_ranks(
            both(rows_for(lengths, dim=DIM), lengths=lengths), alone.eager(rows_for(lengths, dim=DIM), lengths=lengths)
        )
    counts = str((both.encoder.stats.replays, both.encoder.stats.eager))
    assert told(counts) == [counts] * ranks


def a_warm_up_file_of_rank_0_holds_for_all(rank, ranks):
    """The others have none. It says nothing of the module when it is not sharded."""
    costs = Costs({b: b.rows / 100 for b in BUDGETS}, 1e-9, host=50.0)
    path = Path(told(tempfile.mkdtemp() if rank == 0 else None)[0], "warm.json")
    _, before = encoders()
    if rank == 0:
        before.encoder.costs = costs
        before.encoder.save_warmup(path)
    dist.barrier()
    module = Block()
    alone = copy.deepcopy(module)
    parallelize_module(module, mesh(), PLAN)
    encoder = vg.GraphedEncoder(
        module, BUDGETS, SPEC, backend="tape", capture=vg.options.Capture(warmup=path if rank == 0 else None)
    )
    assert encoder.costs.measured is (rank == 0)
    both = vg.parallel.TensorParallelEncoder(encoder)
    assert encoder.executor.store.budgets.known == set(BUDGETS)
    assert encoder.costs.as_json() == costs.as_json()
    with pytest.warns(UserWarning, match="was written for another setup: weights is .*It is ignored"):
        alone = vg.GraphedEncoder(alone, BUDGETS, SPEC, backend="tape", capture=vg.options.Capture(warmup=path))
    for lengths in LENGTHS:
        check_on_all_ranks(
            both(rows_for(lengths, dim=DIM), lengths=lengths), alone.eager(rows_for(lengths, dim=DIM), lengths=lengths)
        )
    assert encoder.costs.as_json() == costs.as_json()


RUNS = []
"""Numbers of rows of all runs of failing modules; no module keeps it, so captures do not copy it."""


class Fails(Block):
    """Raises in the middle of some runs: of so many rows, at the run with this number."""

    def __init__(self, runs, error=None):
        super().__init__()
        self.fails, self.error = runs, error or RuntimeError("no luck")
        RUNS.clear()

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        y = super().forward(x, cu_seqlens, max_seqlen, scale)
        RUNS.append(len(x))
        if self.fails.get(len(x)) == RUNS.count(len(x)):
            raise self.error
        return y


OTHER_BUDGETS = [vg.budgets.Budget(96, items=4), vg.budgets.Budget(192, items=8)]
"""Not of as many rows as what is run before the capture to check the declaration."""


def a_budget_that_fails_on_one_rank_is_out_of_use_on_all(rank, ranks):
    """While it is rehearsed, twice, and while it is captured, which is the fourth run; the largest runs once before."""
    alone = vg.GraphedEncoder(Block(), OTHER_BUDGETS, SPEC, verify=UNVERIFIED, **SIMULATED)
    for rows, run, error in ((192, 1, None), (96, 2, MemoryError("no memory is left")), (192, 4, None), (96, 4, None)):
        module = Fails({rows: run + (rows == 192)} if rank == 1 else {}, error)
        _, both = encoders(module, budgets=OTHER_BUDGETS, verify=UNVERIFIED)
        with pytest.warns(UserWarning, match=f"graph of {rows} rows could not be captured, and the budget is disabled"):
            both.capture()
        (reason,) = both.encoder.disabled.values()
        assert str(error or "no luck") in reason
        assert ("rank 1" in reason) is (rank != 1)
        for lengths in ([5, 6], [90, 90], [150]):
            x = rows_for(lengths, dim=DIM)
            check_on_all_ranks(both(x, lengths=lengths), alone(x, lengths=lengths))
        assert told(sum(both.encoder.stats.eager.values())) == [int(rows == 192)] * ranks


def what_fails_on_one_rank_raises_on_all(rank, ranks):
    """In a run before the capture, and at all budgets."""
    for runs in {32: 1}, {96: 1, 192: 2}:
        _, both = encoders(Fails(runs if rank == 1 else {}), budgets=OTHER_BUDGETS, verify=UNVERIFIED)
        expected = (
            (RuntimeError, "no luck") if rank == 1 else (vg.errors.RankError, "rank 1 raised an error: .*no luck")
        )
        with pytest.raises(expected[0], match=expected[1]):
            both(rows_for([5], dim=DIM), lengths=[5])
        check_on_all_ranks(
            both(rows_for([5], dim=DIM), lengths=[5]), both.encoder.eager(rows_for([5], dim=DIM), lengths=[5])
        )  # ranks are in step


def ranks_with_other_budgets_are_told_so(rank, ranks):
    with pytest.raises(vg.errors.RankError, match="rank 1 was called with"):
        encoders(budgets=[64, 128] if rank == 1 else [64])


# Mistakes, the same on all ranks


def a_sharded_module_needs_the_ranks_to_agree(rank, ranks):
    _, both = encoders()
    encoder = vg.GraphedEncoder(both.module, BUDGETS, SPEC, **SIMULATED)
    with pytest.raises(vg.errors.SpecError, match=r"make calls through vg\.parallel\.TensorParallelEncoder"):
        encoder(rows_for([5], dim=DIM), lengths=[5])
    check_on_all_ranks(encoder.eager(rows_for([5], dim=DIM), lengths=[5]), both(rows_for([5], dim=DIM), lengths=[5]))


def a_module_that_is_not_sharded_is_told(rank, ranks):
    encoder = vg.GraphedEncoder(Block(), BUDGETS, SPEC, **SIMULATED)
    with pytest.warns(UserWarning, match="no weight of Block is sharded, so every rank does all of the work"):
        both = vg.parallel.TensorParallelEncoder(encoder)
    check_on_all_ranks(both(rows_for([5], dim=DIM), lengths=[5]), encoder.eager(rows_for([5], dim=DIM), lengths=[5]))


def plans_that_cannot_be(rank, ranks):
    for plan, message in (
        ({"blocks.*.attn.qkv": ColwiseParallel()}, r"expected 3 x 6 heads of 16.*tensor_plan\(tower\)"),
        ({"pos_embed": ColwiseParallel()}, "the table of position embeddings is sharded over ranks"),
    ):
        tower = qwen3_vl_tower(num_heads=6, hidden_size=96)
        parallelize_module(tower, mesh(), plan)
        both = vg.parallel.TensorParallelEncoder(vg.recipes.qwen3_vl(tower, [256], backend="tape"))
        with pytest.raises(vg.errors.SpecError, match=message):
            both(pixels(GRIDS[0]), grid_thw=GRIDS[0])
    _, both = linears({"2": ColwiseParallel(use_local_output=False)}, mesh())
    with pytest.raises(vg.errors.SpecError, match=r"output is sharded over ranks, .*Shard\(dim="):
        both(rows_for([5], dim=DIM), lengths=[5])
    tower = qwen3_vl_tower(num_heads=1)
    with pytest.raises(vg.errors.SpecError, match=f"1 head cannot be divided among {ranks} ranks"):
        parallelize_module(tower, mesh(), vg.parallel.tensor_plan(tower))


def a_rank_that_is_given_rows_apart(rank, ranks):
    """What is not detected, as the page says: here it shows that ranks share the result."""
    _, both = encoders(verify=UNVERIFIED)
    rows = rows_for([5], dim=DIM)
    out = both(rows + rank, lengths=[5])
    assert out.isfinite().all()


# Ranks that are lost: each ends its group, so they come last


def lose(rank, both, before):
    """Make two calls, before the second of which the last rank is lost; the seconds that others waited."""
    both(rows_for([5, 6], dim=DIM), lengths=[5, 6])
    if rank == dist.get_world_size() - 1:
        before()
    start = time.perf_counter()
    with pytest.raises(vg.errors.RankError, match="a rank of the group died, hangs, raised an error"):
        both(rows_for([5, 6], dim=DIM), lengths=[5, 6])
    seconds = time.perf_counter() - start
    for call in (lambda: both(rows_for([5, 6], dim=DIM), lengths=[5, 6]), both.check, both.capture):
        with pytest.raises(vg.errors.RankError, match="cannot be used any more: end the process"):
            call()
    assert time.perf_counter() - start < seconds + 1  # it is told at once
    return seconds


def a_rank_that_hangs_is_waited_for_until_the_timeout(rank, ranks):
    """In processes of its own, because torch takes meshes of the same ranks for the same, whatever their groups are."""
    own = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=2)), "cpu")
    _, both = linears({"0": ColwiseParallel(), "2": RowwiseParallel()}, own)
    seconds = lose(rank, both, lambda: time.sleep(4))
    assert rank == ranks - 1 or seconds < 4


def a_rank_that_is_killed_raises_on_all_others(rank, ranks):
    seconds = lose(rank, encoders(verify=UNVERIFIED)[1], lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert seconds < TIMEOUT.total_seconds()


SCENARIOS = {
    "2 ranks": (
        2,
        [
            any_lengths,
            any_call_equals_that_of_one_rank,
            a_tower,
            other_towers,
            padding_that_holds_nan,
            graphs_are_proven,
            outputs_and_weights_that_are_gathered,
            weights_that_change_in_place,
            shards_that_move_are_found,
            hooks_of_others_run_eager,
            ranks_plan_by_what_rank_0_measured,
            a_warm_up_file_of_rank_0_holds_for_all,
            a_budget_that_fails_on_one_rank_is_out_of_use_on_all,
            what_fails_on_one_rank_raises_on_all,
            ranks_with_other_budgets_are_told_so,
            a_sharded_module_needs_the_ranks_to_agree,
            plans_that_cannot_be,
            a_rank_that_is_given_rows_apart,
        ],
    ),
    "3 ranks": (
        3,
        [
            any_lengths,
            padding_that_holds_nan,
            ranks_plan_by_what_rank_0_measured,
            a_budget_that_fails_on_one_rank_is_out_of_use_on_all,
            what_fails_on_one_rank_raises_on_all,
            a_rank_that_is_killed_raises_on_all_others,
        ],
    ),
    "2 ranks, one of which hangs": (2, [a_rank_that_hangs_is_waited_for_until_the_timeout]),
}
"""The number of ranks of each group, and its scenarios, in the order in which it runs them."""


if __name__ == "__main__":
    fork_groups(SCENARIOS)
