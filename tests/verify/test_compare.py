"""The difference of two outputs of a call, item by item, against its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encoders import attention_spec
from varlen_graphs.declaration.call import Call
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.verify.compare import ONE_ROW, Example

DECLARED = attention_spec().declared


def layout_of(rows):
    return Layout(tuple((1, 1, one) for one in rows))


def differences(output, expected, rows):
    call = Call(expected, {}, {}, (), {}, None, layout_of(rows))
    return [one.error for one in Example(call, expected).differences(flatten(output, DECLARED))]


def defined(output, expected, rows):
    """The error of each item: of the whole, or an eighth of that of its worst row, relative to it or to an average."""
    pairs = [*zip(output.double().split(rows), expected.double().split(rows), strict=True)]
    mean = math.sqrt(sum(float(one.square().sum()) for _, one in pairs) / max(1, expected.numel()))
    errors = []
    for one, other in pairs:
        size = max(float(other.norm()), mean * math.sqrt(other.numel()), 1e-30)
        worst = float((one - other).norm(dim=1).max()) * math.sqrt(len(one))
        errors.append(max(float((one - other).norm()), worst / ONE_ROW) / size)
    return errors


@given(st.lists(st.integers(1, 9), min_size=1, max_size=70), st.integers(1, 5), st.integers(0, 2**31))
def test_errors_are_relative_to_the_item_or_to_an_average_one(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(len(rows), generator=generator).repeat_interleave(torch.tensor(rows))[:, None] ** 4
    expected = torch.randn(sum(rows), width, generator=generator) * scales
    output = (
        expected
        + 1e-3 * torch.randn(expected.shape, generator=generator) * torch.rand(sum(rows), 1, generator=generator) ** 8
    )
    assert differences(output, expected, rows) == pytest.approx(defined(output, expected, rows), rel=1e-9)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_is_equal_or_an_infinite_error(rows, value):
    expected = torch.ones(sum(rows), 3)
    expected[0, 1] = value
    output = expected.clone()
    assert differences(output, expected, rows) == [0.0] * len(rows)
    output[-1, 2] = value
    assert differences(output, expected, rows) == [0.0] * (len(rows) - 1) + [math.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_default_dtype_of_the_caller_does_not_matter(dtype):
    expected = torch.ones(70_000, 2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert differences(expected * 1.5, expected, [70_000]) == pytest.approx([0.5])
    finally:
        torch.set_default_dtype(before)


def test_complex_numbers_are_no_real_ones():
    expected = torch.full((5, 2), 1 + 2j)
    assert differences(expected * 1.5, expected, [2, 3]) == pytest.approx([0.5, 0.5])
    assert differences(expected.real, expected, [2, 3]) == [math.inf, math.inf]


def test_integers_differ_by_the_share_that_is_not_equal():
    expected = torch.arange(12).view(6, 2)
    output = expected.clone()
    output[5, 1] = 100
    assert differences(output, expected, [2, 4]) == pytest.approx([0, math.sqrt(1 / 8)])


def test_an_output_of_another_size_is_an_infinite_error():
    assert differences(torch.ones(5, 2), torch.ones(5, 3), [2, 3]) == [math.inf, math.inf]
    assert differences(torch.ones(5, 2), torch.ones(4, 2), [2, 3]) == [math.inf, math.inf]
