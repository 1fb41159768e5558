"""`parallel.DataParallelEncoder`: the assignment in this process, everything else in groups of processes over gloo."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder
from tests.support.parallel_scenarios import SCENARIOS
from tests.support.ranks import check_scenario, run_groups
from varlen_graphs.parallel.assign import Weights, assign
from varlen_graphs.routing.costs import Costs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_groups("tests.support.parallel_scenarios", SCENARIOS, tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize(
    ("group", "scenario"),
    [(group, scenario.__name__) for group, (_, scenarios) in SCENARIOS.items() for scenario in scenarios],
)
def test_a_group_of_processes(results, group, scenario):
    check_scenario(results[group], scenario)


costs_of_tasks = st.lists(st.integers(1, 1000), max_size=30)


@given(costs_of_tasks, st.integers(1, 8))
def test_every_task_is_assigned_once_in_order(costs, ranks):
    tasks = assign(costs, ranks)
    assert len(tasks) == ranks
    assert all(own == sorted(own) for own in tasks)
    assert sorted(itertools.chain.from_iterable(tasks)) == list(range(len(costs)))


@given(costs_of_tasks, st.integers(1, 8))
def test_no_rank_could_give_its_last_task_away(costs, ranks):
    """So no load is above the mean by more than one task, less its share."""
    loads = [sum(costs[task] for task in own) for own in assign(costs, ranks)]
    assert max(loads) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0) + 1e-9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(2, 3))
def test_the_busiest_rank_is_within_the_bound_of_the_best_assignment(costs, ranks):
    def busiest(owners):
        return max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)
        )

    best = min(map(busiest, itertools.product(range(ranks), repeat=len(costs))))
    loads = [sum(costs[task] for task in own) for own in assign(costs, ranks)]
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_equal_tasks_of_a_rank_adjoin():
    assert assign([3] * 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert assign([3, 3, 9, 3, 3], 2) == [[0, 2], [1, 3, 4]]


def test_ranks_without_tasks_have_empty_lists():
    assert assign([7], 3) == [[0], [], []]
    assert assign([], 2) == [[], []]


def test_weights_are_what_was_measured():
    small, large = vg.budgets.Budget(100), vg.budgets.Budget(1000)
    assert Weights.of(Costs.in_rows([small, large])) == (1, 0)
    measured = Costs({small: 2.0, large: 10.0}, per_square=1e-6, host=5.0)
    weights = Weights.of(measured)
    assert weights == (10**10, 10**6)
    assert weights.cost(1000, 10**6) == math.floor(11 * 1e12)


def test_without_a_process_group_the_error_says_how_to_make_one():
    with pytest.raises(vg.errors.SpecError, match="launch with torchrun, and call"):
        vg.parallel.DataParallelEncoder(attention_encoder())


def test_options_that_cannot_be():
    with pytest.raises(vg.errors.SpecError, match="encoder is a Linear: expected a GraphedEncoder of the module"):
        vg.parallel.DataParallelEncoder(torch.nn.Linear(2, 2))
    with pytest.raises(vg.errors.SpecError, match="inputs='half': expected 'whole' or 'spread'"):
        vg.parallel.DataParallelEncoder(attention_encoder(), inputs="half")


def test_a_group_of_one_is_the_encoder():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        encoder = attention_encoder()
        alone = vg.parallel.DataParallelEncoder(encoder)
        rows = torch.randn(8, 8)
        assert torch.equal(alone(rows, lengths=[5, 3]), encoder(rows, lengths=[5, 3]))
        assert repr(alone).endswith("captured), rank 0 of 1)")
    finally:
        torch.distributed.destroy_process_group()
