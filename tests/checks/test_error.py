"""`relative_error` of tensors counts numbers that are not finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen_graphs.checks.error import relative_error

NAN, INF = math.nan, math.inf


@given(st.lists(st.floats(width=32), max_size=8))
def test_a_tensor_does_not_differ_from_itself(values):
    tensor = torch.tensor(values)
    assert relative_error(tensor, tensor.clone()) == 0


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([3.0, 4.5, INF, NAN], [3.0, 4.0, INF, NAN], 0.1),
        ([1.1j], [1j], 0.1),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([INF], [-INF], INF),
        ([1], [2], INF),
        ([True], [False], INF),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_the_error_is_relative_to_what_is_right(one, other, error):
    assert relative_error(torch.tensor(one), torch.tensor(other)) == pytest.approx(error)
