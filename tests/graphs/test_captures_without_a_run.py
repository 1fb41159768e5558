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
from tests.support.other_sizes import FOLLOWED, OtherwiseWhereSmall, table
from varlen_graphs.capture.tape import TapeCapture

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
    assert [runs[size] for size in (64, 96, 128)] == [1] * 3, runs  # few rows run in checks too
    assert min(runs[256], runs[192]) > 1  # the first of a size that had not run shows what runs keep
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


@pytest.fixture
def captures_that_compute_nothing(monkeypatch):
    """As on a GPU: what a capture makes holds anything, until its graph replays."""
    capture = TapeCapture.capture

    def without_results(self, run, *more):
        tape = capture(self, run, *more)
        for tensor in tape.allocated:
            tensor.fill_(7) if tensor.dtype != torch.bool else tensor.logical_not_()
        return tape

    monkeypatch.setattr(TapeCapture, "capture", without_results)


@pytest.mark.parametrize(("small", "returns"), [(100, False), (1000, False), (1000, True), (0, True)])
@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "lazily"])
def test_a_cache_outside_of_the_module_is_left_as_runs_leave_it(captures_that_compute_nothing, small, returns, lazy):
    table.cache_clear()
    module = OtherwiseWhereSmall(other_sizes.cached_outside, small, returns)
    encoder = encoder_of(module, budgets=BUDGETS, capture=vg.options.Capture(lazy=lazy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in ([6], [90], [120], [40]):
            rows = rows_for(lengths)
            got = encoder(rows, lengths=lengths)
            torch.testing.assert_close(got[0] if returns else got, module.linear(rows))
        encoder.capture_pending(None) if lazy else encoder.capture()
        encoder.poison()
        for rows in BUDGETS:
            assert bool((table(rows, torch.device("cpu")) == 1).all()), rows


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
@settings(max_examples=15, deadline=None)
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
