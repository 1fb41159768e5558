"""Examples may coincide: the doctor runs their rows with items of its own."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import Of


def by_the_first_length(m, x, lengths):
    return x * m.factors[len(lengths)]


def by_the_first_side(m, x, grid_thw):
    return x * m.factors[len(grid_thw)]


def by_the_first_boundary(m, x, cu_seqlens):
    return x * m.factors[int(cu_seqlens[1])]


LENGTHS = torch.tensor([3, 5])
EXAMPLES = {
    by_the_first_length: {"lengths": LENGTHS},
    by_the_first_side: {"grid_thw": torch.tensor([[2, 2, 1], [1, 1, 4]])},
    by_the_first_boundary: {"cu_seqlens": torch.tensor([0, 3, 8])},
}


@pytest.mark.parametrize("function", EXAMPLES)
def test_one_example_is_enough_where_the_items_can_be_changed(function):
    module = Of(function)
    module.factors = [*range(2, 12)]
    findings = vg.diagnose(module, {"x": torch.ones(8, 4)} | EXAMPLES[function])
    assert {finding.line.function for finding in findings} == {function.__name__}
    assert any("with other items" in finding.what or finding.kind == "host sync" for finding in findings)


def test_a_module_that_refuses_other_items_is_diagnosed_with_those_it_takes():
    def forward(m, x, lengths):
        assert lengths.tolist() == [3, 5]
        return x * 2

    kinds = [finding.kind for finding in vg.diagnose(Of(forward), {"x": torch.ones(8, 4), "lengths": LENGTHS})]
    assert kinds == ["host sync"]


def test_calls_whose_numbers_follow_from_the_items_are_left_as_they_are():
    def forward(m, x, lengths, max_seqlen):
        ran.append(lengths.shape)
        return x * lengths.sum()

    ran = []
    assert vg.diagnose(Of(forward), {"x": torch.ones(8, 4), "lengths": LENGTHS, "max_seqlen": 5}).ok
    assert len(ran) == 3
