"""Graphs that calls capture when they need them."""

import warnings

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, captured, check, rows_for
from tests.support.threads import run_in_threads

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
    encoder = vg.GraphedEncoder(Limited(8).eval(), BUDGETS, SHAPED, backend="tape")
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        check(encoder, [60])
    assert encoder.disabled.keys() == {LARGEST}
    assert captured(encoder) == {BUDGETS[1]}
    with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
        output = encoder(rows_for([60, 20]), lengths=[60, 20])
    assert output.isfinite().all()
    assert encoder.disabled.keys() == {LARGE, LARGEST}


def test_where_neither_what_a_call_needs_nor_the_largest_budget_can_be_captured_others_are_tried():
    encoder = vg.GraphedEncoder(Limited(8).eval(), BUDGETS, SHAPED, backend="tape")
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
    encoder = vg.GraphedEncoder(Short(8).eval(), BUDGETS, SHAPED, backend="tape")
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

    encoder = vg.GraphedEncoder(Shrinking(8).eval(), BUDGETS, SHAPED, backend="tape")
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
    encoder = vg.GraphedEncoder(Wrong(8).eval(), BUDGETS, SHAPED, backend="tape")
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
