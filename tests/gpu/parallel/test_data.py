"""Data parallel on two GPUs, in processes of their own."""

import pytest

from tests.gpu.parallel_scenarios import LOST, SCENARIOS
from tests.support.gpu import on_gpus
from tests.support.ranks import check_scenario, run_group

RANKS = 2

pytestmark = on_gpus(RANKS)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_group("tests.gpu.parallel_scenarios", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_a_group_of_gpus(results, scenario):
    check_scenario(results, scenario)


def test_a_rank_that_is_killed_raises_on_all_others(tmp_path):
    results = run_group("tests.gpu.parallel_scenarios", RANKS, tmp_path, TORCH_NCCL_BLOCKING_WAIT="1")
    assert [own.get(LOST[0].__name__) for own in results[:-1]] == [""] * (RANKS - 1), results
