"""`GraphCapture`: after the first graph of a set, budgets are captured without a run where all do the same."""

import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import other_sizes
from tests.support.encoders import UNVERIFIED, encoder_of, rows_for
from tests.support.other_sizes import FOLLOWED, OtherwiseWhereSmall

BUDGETS = (32, 64, 96, 128, 192, 256)


def check_calls(encoder, module, sizes):
    for lengths in sizes:
        rows = rows_for(lengths)
        with torch.no_grad():
            torch.testing.assert_close(encoder(rows, lengths=lengths), module.linear(rows))


def test_later_budgets_run_once():
    other_sizes.SIZES.clear()
    encoder = encoder_of(OtherwiseWhereSmall(other_sizes.attribute), budgets=BUDGETS, verify=UNVERIFIED).capture()
    runs = Counter(other_sizes.SIZES)
    assert [runs[size] for size in (64, 96, 128, 192)] == [1] * 4, runs  # few rows run in checks too
    assert runs[256] > 1
    assert len(encoder.executor.store) == len(BUDGETS)


@pytest.mark.parametrize("function", FOLLOWED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("ahead", [False, True], ids=["called", "captured"])
def test_what_small_sizes_alone_do_is_followed(function, ahead):
    module = OtherwiseWhereSmall(function)
    encoder = encoder_of(module, budgets=BUDGETS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ahead:
            encoder.capture()
        check_calls(encoder, module, [[6], [20, 9], [50], [40, 50], [120], [200], [3, 2]])
        encoder.poison()
        check_calls(encoder, module, [[90], [60], [30]])
    assert not encoder.disabled
    assert not encoder.stats.eager


def test_what_no_graph_can_hold_is_refused_at_small_sizes_alone():
    module = OtherwiseWhereSmall(other_sizes.read)
    encoder = encoder_of(module, budgets=BUDGETS)
    with pytest.warns(UserWarning, match=r"(?s)graph of .*rows could not be captured.*other_sizes\.py"):
        encoder.capture()
    assert {budget.rows for budget in encoder.disabled} == {32, 64, 96}
    check_calls(encoder, module, [[6], [50], [200]])


def test_a_tensor_that_small_sizes_alone_read_is_guarded():
    module = OtherwiseWhereSmall(other_sizes.another)
    encoder = encoder_of(module, budgets=BUDGETS).capture()
    module.another = torch.full((8,), 2.0)
    with pytest.raises(vg.errors.StaleGraphError, match="'another'"):
        encoder.check()


@given(
    functions=st.lists(st.sampled_from(FOLLOWED), min_size=1, max_size=3),
    budgets=st.lists(st.integers(8, 240), min_size=1, max_size=6, unique=True),
    calls=st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=3), min_size=1, max_size=4),
    lazy=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_whatever_small_sizes_do_outputs_are_right(functions, budgets, calls, lazy):
    def function(module, x):
        for one in functions:
            x = one(module, x)
        return x

    module = OtherwiseWhereSmall(function)
    encoder = encoder_of(module, budgets=[*budgets, 256], capture=vg.options.Capture(lazy=lazy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_calls(encoder, module, calls)
        if lazy:
            encoder.capture_pending(None)
            check_calls(encoder, module, calls)
    assert not encoder.disabled
