"""`attention.timing`: the choices of a run, and runs that repeat them."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.segments import boundaries
from varlen_graphs.attention.timing import NotRepeatedError, measuring, repeating

LENGTHS = [5, 3]


def attend(times):
    q, k, v = torch.randn(8, 3, 2, 16, generator=torch.Generator().manual_seed(0)).unbind(1)
    return [vg.varlen_attention(q, k, v, boundaries(LENGTHS), max(LENGTHS)) for _ in range(times)]


def test_a_run_with_as_many_calls_repeats_the_choices_of_another():
    with measuring() as first:
        expected = attend(3)
    with repeating(first.choices):
        repeated = attend(3)
    assert len(first.choices) == 3
    assert all(map(torch.equal, repeated, expected))


@pytest.mark.parametrize("times", [2, 4])
def test_a_run_with_fewer_or_more_calls_does_not(times):
    with measuring() as first:
        attend(3)
    with pytest.raises(NotRepeatedError, match=r"(less|more) often"), repeating(first.choices):
        attend(times)
    attend(1)  # nothing is repeated any more


def test_a_choice_that_does_not_support_the_inputs_is_not_repeated():
    with pytest.raises(NotRepeatedError, match=r"'hopper' got torch\.float32 on cpu"), repeating(["hopper"]):
        attend(1)


def test_a_named_backend_is_no_choice():
    q, k, v = torch.randn(8, 3, 2, 16).unbind(1)
    with measuring() as first, repeating([]):
        vg.varlen_attention(q, k, v, boundaries(LENGTHS), 5, backend="reference")
    assert not first.choices
