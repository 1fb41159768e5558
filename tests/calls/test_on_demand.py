"""`Executor`: a call captures the graphs that it needs, and `Capture(start_step=...)` what they begin with."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, captured, check, rows_for
from tests.support.threads import run_in_threads
from varlen_graphs.calls import execute
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets

BUDGETS = [vg.budgets.Budget(rows, items=8) for rows in (32, 64, 96, 128)]
SMALL, _, LARGE, LARGEST = BUDGETS
SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


def test_a_call_captures_what_it_needs_and_the_first_one_the_largest_budget_too():
    encoder = attention_encoder(BUDGETS)
    check(encoder, [20])
    assert captured(encoder) == {SMALL, LARGEST}
    check(encoder, [15, 10])
    assert captured(encoder) == {SMALL, LARGEST}
    check(encoder, [80])
    assert captured(encoder) == {SMALL, LARGE, LARGEST}
    assert encoder.stats.replays == {SMALL: 2, LARGE: 1}
    assert not encoder.stats.eager


def test_capture_captures_the_rest():
    encoder = attention_encoder(BUDGETS)
    check(encoder, [20])
    encoder.capture()
    assert captured(encoder) == set(BUDGETS)


def test_a_call_of_several_replays_captures_the_largest_of_what_is_missing():
    encoder = attention_encoder(BUDGETS)
    check(encoder, [120])
    assert captured(encoder) == {LARGEST}
    check(encoder, [120, 20])  # 128 rows and 32
    assert captured(encoder) == {SMALL, LARGEST}
    encoder = attention_encoder(BUDGETS)
    check(encoder, [90, 90, 20])  # 128 rows and 96
    assert captured(encoder) == {LARGEST}
    assert encoder.stats.replays == {LARGEST: 2}
    check(encoder, [90, 90, 20])
    assert captured(encoder) == {LARGE, LARGEST}
    assert encoder.stats.replays == {LARGEST: 3, LARGE: 1}


def test_a_budget_that_is_added_is_captured_and_no_other():
    encoder = attention_encoder(BUDGETS)
    check(encoder, [20])
    added = encoder.add_budget(vg.budgets.Budget(48, items=8))
    assert captured(encoder) == {SMALL, added, LARGEST}
    check(encoder, [40])
    assert encoder.stats.replays == {SMALL: 1, vg.budgets.Budget(48, items=8): 1}


class Limited(Attention):
    """A module that takes few rows only, as if memory were short."""

    most = 70

    def forward(self, x, cu_seqlens, max_seqlen):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, cu_seqlens, max_seqlen)


def test_where_memory_is_short_for_the_largest_budgets_others_are_tried():
    encoder = attention_encoder(BUDGETS, Limited(), SHAPED)
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        check(encoder, [60])
    assert encoder.disabled.keys() == {LARGEST}
    assert captured(encoder) == {BUDGETS[1]}
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        output = encoder(rows_for([60, 20]), lengths=[60, 20])
    assert output.isfinite().all()
    assert encoder.disabled.keys() == {LARGE, LARGEST}


def test_where_neither_what_a_call_needs_nor_the_largest_budget_can_be_captured_others_are_tried():
    encoder = attention_encoder(BUDGETS, Limited(), SHAPED)
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        encoder(rows_for([50, 30]), lengths=[50, 30])  # as two replays, once 96 and 128 rows are disabled
    assert encoder.disabled.keys() == {LARGE, LARGEST}
    assert encoder.stats.replays == {BUDGETS[1]: 2}
    assert not encoder.stats.eager


class Short(Attention):
    """A module with few positions."""

    def forward(self, x, cu_seqlens, max_seqlen):
        if max_seqlen > 70:
            raise ValueError("at most 70 positions")
        return super().forward(x, cu_seqlens, max_seqlen)


@pytest.mark.parametrize("first", [[50, 30], [100], [20]])
def test_a_module_that_refuses_large_budgets_has_graphs_of_small_ones(first):
    """As if all budgets were captured at once: the smallest is tried after the largest."""
    encoder = attention_encoder(BUDGETS, Short(), SHAPED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if first == [100]:
            with pytest.raises(ValueError, match="at most 70 positions"):  # which an eager run refuses, too
                encoder(rows_for(first), lengths=first)
        else:
            check(encoder, first)
        check(encoder, [60])
        check(encoder, [20])
        check(encoder, [50, 30])
    assert encoder.disabled.keys() <= {LARGE, LARGEST}
    assert LARGEST in encoder.disabled


def test_a_module_that_refuses_all_budgets_tells_so():
    encoder = vg.GraphedEncoder(Short(8).eval(), BUDGETS[2:], SHAPED, backend="tape")
    for _ in range(2):
        with pytest.raises(vg.errors.CaptureError, match=r"(?s)at most 70 positions.*in forward: raise ValueError"):
            encoder(rows_for([20]), lengths=[20])


def test_where_all_graphs_were_dropped_the_largest_budget_comes_first_again():
    most = [128]

    class Shrinking(Limited):
        @property
        def most(self):
            return most[0]

    encoder = attention_encoder(BUDGETS, Shrinking(), SHAPED)
    check(encoder, [20])
    encoder.drop_budget(SMALL)
    encoder.drop_budget(LARGEST)
    most[0] = 70
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        assert encoder(rows_for([40, 30, 20]), lengths=[40, 30, 20]).isfinite().all()
    assert captured(encoder) == {BUDGETS[1]}
    assert encoder.disabled.keys() == {LARGE}


def test_a_host_buffer_that_calls_its_encoder_captures_nothing_over_the_call():
    calls = []

    def scale(layout):
        if calls:
            with pytest.raises(vg.errors.InputError, match="called the encoder that it is computed for"):
                encoder(rows_for([90]), lengths=[90])
        return torch.full((1,), 1.0)

    class Scaled(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, scale):
            return super().forward(x, cu_seqlens, max_seqlen) * scale

    buffers = [
        vg.buffers.CuSeqlens(),
        vg.buffers.MaxSeqlen(),
        vg.buffers.HostBuffer("scale", scale, (1,), torch.float32),
    ]
    encoder = vg.GraphedEncoder(Scaled(8).eval(), BUDGETS, vg.BufferSpec("x", vg.Lengths(), buffers), backend="tape")
    expected = encoder(rows_for([6, 3]), lengths=[6, 3])
    before = captured(encoder)
    calls.append(1)
    assert torch.equal(encoder(rows_for([6, 3]), lengths=[6, 3]), expected)
    assert captured(encoder) == before


class Wrong(Attention):
    """A module whose declared cu_seqlens are ignored: no graph equals it."""

    def forward(self, x, cu_seqlens, max_seqlen):
        return super().forward(x, cu_seqlens, max_seqlen) + x.mean()


def test_a_new_set_of_which_every_graph_is_wrong_is_refused_whole():
    encoder = attention_encoder(BUDGETS, Wrong(), SHAPED)
    with pytest.warns(UserWarning, match="4 of 4 graphs failed verification"):
        check(encoder, [20])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in ([20], [60], [90], [120]):
            check(encoder, lengths)
    assert not encoder.stats.replays


def test_threads_that_need_different_budgets_all_get_them():
    encoder = attention_encoder(BUDGETS)

    def work(number):
        for _ in range(3):
            check(encoder, [BUDGETS[number].rows - 2])

    run_in_threads(work, len(BUDGETS))
    assert captured(encoder) == set(BUDGETS)
    assert encoder.stats.replays == dict.fromkeys(BUDGETS, 3)


def test_a_budget_that_no_memory_holds_is_not_added():
    encoder, rows = attention_encoder(), rows_for([5, 9])
    expected = encoder(rows, lengths=[5, 9])
    before = encoder.budgets
    with pytest.raises(vg.errors.BudgetError, match=r"below 2\*\*31"):
        encoder.add_budget(10**12)
    assert encoder.budgets == before
    assert torch.equal(encoder(rows, lengths=[5, 9]), expected)


def stepwise(quiet, monkeypatch, **options):
    """Return an encoder that leaves 96 rows for later, and whose calls all come after a pause, or none but the first.

    Of 64 rows, 128 are twice as many.
    """
    monkeypatch.setattr(execute, "QUIET_S", 0.0 if quiet else float("inf"))
    return attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(start_step=1.5, **options))


def test_budgets_that_others_hold_wait_for_a_call_that_they_fit_best(monkeypatch):
    encoder = stepwise(True, monkeypatch).capture()
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}
    encoder.capture_again()
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}
    check(encoder, [90])
    assert captured(encoder) == set(BUDGETS)
    assert encoder.stats.replays == {LARGE: 1}
    assert encoder.stats.checked == {LARGE: 1}


def test_calls_of_several_items_and_soon_after_others_use_what_there_is(monkeypatch):
    encoder = stepwise(True, monkeypatch).capture()
    check(encoder, [60, 30])
    check(encoder, [60, 30], unseen=True)
    assert encoder.stats.replays == {LARGEST: 2}
    monkeypatch.setattr(execute, "QUIET_S", float("inf"))
    check(encoder, [90])
    assert encoder.stats.replays == {LARGEST: 3}
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}
    monkeypatch.setattr(execute, "QUIET_S", 0.0)
    check(encoder, [90], unseen=True)
    assert encoder.stats.replays == {LARGEST: 3, LARGE: 1}
    check(encoder, [60, 30])
    assert encoder.stats.replays == {LARGEST: 3, LARGE: 2}
    assert not encoder.stats.eager


def test_a_stage_uses_what_there_is(monkeypatch):
    encoder, rows = stepwise(False, monkeypatch).capture(), rows_for([60, 30])
    with encoder.stage([60, 30]) as stage:
        stage.rows.copy_(rows)
    torch.testing.assert_close(stage.output, encoder.eager(rows, lengths=[60, 30]))
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}


def test_calls_capture_what_nothing_else_holds_in_about_the_time(monkeypatch):
    """Without a capture ahead the first call brings the largest budget, which takes too long for others."""
    encoder = stepwise(False, monkeypatch)
    check(encoder, [10, 10])
    assert captured(encoder) == {SMALL, LARGEST}
    encoder.costs = vg.routing.Costs({budget: float(budget.rows) for budget in BUDGETS})
    check(encoder, [60, 30])
    assert captured(encoder) == {SMALL, LARGEST}
    check(encoder, [40])  # which would take twice as long in 128 rows
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}
    assert encoder.stats.replays == {SMALL: 1, BUDGETS[1]: 1, LARGEST: 1}


def test_what_waits_for_calls_is_captured_to_be_verified(monkeypatch):
    encoder = stepwise(False, monkeypatch).capture()
    calls = [{"x": rows_for([20]), "lengths": [20]}, {"x": rows_for([90]), "lengths": [90]}]
    assert encoder.verify(calls).budgets == tuple(BUDGETS)
    assert captured(encoder) == set(BUDGETS)


def test_lazy_calls_request_what_was_left_out(monkeypatch):
    encoder = stepwise(True, monkeypatch, lazy=True).capture()
    check(encoder, [90])
    assert captured(encoder) == {SMALL, BUDGETS[1], LARGEST}
    assert encoder.capture_pending() == [LARGE]
    check(encoder, [90])
    assert encoder.stats.replays == {LARGEST: 1, LARGE: 1}


@pytest.mark.parametrize("step", [1, 0.5, float("nan"), "2", True])
def test_a_start_step_is_a_ratio_above_1(step):
    with pytest.raises(vg.errors.SpecError, match="start_step"):
        vg.options.Capture(start_step=step)


@given(
    budgets=st.sets(
        st.builds(vg.budgets.Budget, *(st.integers(1, most) for most in (200, 9, 40, 200))), min_size=1, max_size=12
    ),
    step=st.floats(1.01, 4),
)
def test_what_is_captured_first_holds_whatever_all_budgets_hold(budgets, step):
    enabled = EnabledBudgets(Costs.in_rows(budgets))
    chosen = enabled.covering(step)
    assert len({*chosen}) == len(chosen)
    for budget in budgets:
        assert any(one.holds(*budget) and one.rows <= step * budget.rows for one in chosen)
    for one in chosen:  # none is there for nothing
        larger = [other for other in chosen if other > one]
        assert not any(other.holds(*one) and other.rows <= step * one.rows for other in larger)


@pytest.mark.parametrize("write", [lambda weight: weight.mul_(2), lambda weight: weight.data.mul_(2)])
def test_graphs_of_later_calls_are_right_after_weights_have_changed(write, monkeypatch):
    """What the module gave for earlier graphs is another output by now."""
    encoder = stepwise(True, monkeypatch).capture()
    with torch.no_grad():
        write(encoder.module.qkv.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(encoder, [90])
    assert encoder.stats.replays == {LARGE: 1}


class WrongIn96(Attention):
    """A module whose padding changes its outputs, at one size alone."""

    def forward(self, x, cu_seqlens, max_seqlen):
        out = super().forward(x, cu_seqlens, max_seqlen)
        return out + x.mean() if len(x) == 96 else out


def test_a_graph_of_a_later_call_is_checked_as_the_first_ones_are(monkeypatch):
    monkeypatch.setattr(execute, "QUIET_S", 0.0)
    options = {"spec": SHAPED, "capture": vg.options.Capture(start_step=1.5)}
    encoder = attention_encoder(BUDGETS, WrongIn96(8).eval(), **options).capture()
    with pytest.warns(UserWarning, match="1 of 1 graphs failed verification"):
        check(encoder, [90])
    check(encoder, [90])
    assert encoder.stats.replays == {LARGEST: 2}
