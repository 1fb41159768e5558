"""Graphs of exactly the size of recurring layouts."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, rows_for
from tests.support.towers import equal_bits

BUDGETS = [vg.Budget(64, items=8), vg.Budget(128, items=8)]
SMALL, LARGE = BUDGETS
SHAPED = attention_spec(rows=vg.PackedRows("x", shape=(8,)))


def recurring(most=2, budgets=BUDGETS, **options):
    lazy = options.pop("lazy", False)
    return attention_encoder(budgets, spec=SHAPED, capture=vg.Capture(exact=most, lazy=lazy), **options)


def exact(lengths):
    """Return the size of the graph of a layout of some lengths."""
    return vg.Budget(sum(lengths), items=len(lengths), segments=len(lengths), max_seqlen=max(lengths))


def call(encoder, lengths, times=1):
    """Call an encoder and compare with an eager run."""
    for seed in range(times):
        rows = rows_for(lengths, seed=seed)
        torch.testing.assert_close(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))


def test_a_layout_that_recurs_gets_a_graph_of_its_size_between_calls():
    encoder = recurring()
    call(encoder, [20, 13], times=3)
    assert encoder.capture_wanted() == []
    call(encoder, [20, 13])
    assert encoder.capture_wanted() == [exact([20, 13])]
    assert encoder.capture_wanted() == []
    call(encoder, [20, 13])
    assert encoder.stats.replays == {SMALL: 4, exact([20, 13]): 1}
    assert encoder.budgets == tuple(BUDGETS)
    assert re.search(r"\b33 +2 +2 +- +1  of one layout", encoder.report())


def test_its_output_is_that_of_an_eager_run_to_the_bit():
    encoder = recurring()
    call(encoder, [20, 13], times=4)
    encoder.capture_wanted()
    rows = rows_for([20, 13], seed=9)
    assert equal_bits(encoder(rows, lengths=[20, 13]), encoder.eager(rows, lengths=[20, 13]))
    assert encoder.stats.replays[exact([20, 13])] == 1


def test_no_other_layout_uses_it():
    encoder = recurring()
    call(encoder, [33], times=4)
    encoder.capture_wanted()
    for lengths in ([32], [20, 13], [34], [1] * 8):
        call(encoder, lengths)
    assert encoder.stats.replays == {SMALL: 8}


def test_layouts_of_one_size_share_it():
    encoder = recurring(most=1)
    call(encoder, [20, 13], times=4)
    assert encoder.capture_wanted() == [exact([20, 13])]
    other = recurring(most=2)
    for lengths in ([20, 13], [13, 20]):
        call(other, lengths, times=4)
    assert other.capture_wanted(None) == [exact([20, 13])]
    for lengths in ([20, 13], [13, 20]):
        call(other, lengths)
    assert other.stats.replays[exact([20, 13])] == 2


def test_layouts_that_come_much_more_often_take_the_place_of_others():
    encoder = recurring(most=2)
    for lengths in ([10], [11]):
        call(encoder, lengths, times=4)
    assert encoder.capture_wanted(None) == [exact([10]), exact([11])]
    call(encoder, [12], times=7)
    assert encoder.capture_wanted(None) == []  # hardly more often
    call(encoder, [11], times=3)
    call(encoder, [12])
    assert encoder.capture_wanted(None) == [exact([12])]
    (graphs,) = encoder.executor.store.sets
    assert {*graphs.budgets} - {*BUDGETS} == {exact([11]), exact([12])}
    call(encoder, [10])
    assert exact([10]) not in encoder.stats.replays


def test_traffic_that_was_long_ago_counts_little():
    encoder = recurring(most=1)
    call(encoder, [10], times=40)
    assert encoder.capture_wanted() == [exact([10])]
    for _ in range(3):  # 3,000 calls of all kinds
        encoder.stats.calls += 1000
    call(encoder, [12], times=12)
    assert encoder.capture_wanted() == [exact([12])]


def test_released_graphs_come_back():
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_wanted()
    encoder.release()
    call(encoder, [20])
    assert encoder.stats.replays[SMALL] == 5
    assert encoder.capture_wanted() == [exact([20])]
    call(encoder, [20])
    assert encoder.stats.replays[exact([20])] == 1


def test_lazy_encoders_capture_what_calls_requested_first():
    encoder = recurring(lazy=True)
    call(encoder, [20])
    assert encoder.capture_wanted(None) == [SMALL]
    call(encoder, [20], times=4)
    assert encoder.capture_wanted(None) == [exact([20])]


def test_a_thread_captures_them_in_the_background():
    encoder = recurring()
    call(encoder, [20])
    future = encoder.capture_in_background()
    call(encoder, [20], times=3)
    for _ in range(1000):
        if exact([20]) in encoder.stats.replays:
            break
        call(encoder, [20])
    future.cancel()
    assert encoder.stats.replays[exact([20])]


def test_a_limit_on_memory_comes_first():
    encoder = attention_encoder(BUDGETS, spec=SHAPED).capture()
    limited = recurring(memory=encoder.bytes())
    limited.capture()
    call(limited, [20], times=4)
    before = limited.bytes()
    limited.capture_wanted()
    assert limited.bytes() == before <= encoder.bytes()
    assert limited.capture_wanted() == []
    call(limited, [20])
    assert not limited.disabled


def test_static_arguments_have_graphs_of_their_own():
    class Scaled(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, scale=1):
            return super().forward(x, cu_seqlens, max_seqlen) * scale

    encoder = vg.GraphedEncoder(Scaled(8).eval(), BUDGETS, SHAPED, backend="tape", capture=vg.Capture(exact=2))
    rows = rows_for([20])
    for scale in (1, 2):
        for _ in range(4):
            encoder(rows, lengths=[20], scale=scale)
    assert encoder.capture_wanted(None) == [exact([20])] * 2
    for scale in (1, 2):
        assert equal_bits(encoder(rows, lengths=[20], scale=scale), encoder.eager(rows, lengths=[20], scale=scale))
    assert encoder.stats.replays[exact([20])] == 2


def test_weights_that_changed_are_noticed():
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_wanted()
    with torch.no_grad():
        for parameter in encoder.module.parameters():
            parameter.mul_(2)
    call(encoder, [20])
    encoder.module.double()
    with pytest.raises(vg.StaleGraphError):
        encoder(rows_for([20]), lengths=[20])


def test_verification_in_service_stops_a_graph_that_is_wrong(monkeypatch):
    encoder = recurring(verify=2)
    call(encoder, [20], times=4)
    encoder.capture_wanted()
    (graphs,) = encoder.executor.store.sets
    graph = graphs[exact([20])]
    right = graph.replay
    monkeypatch.setattr(graph, "replay", lambda: (right(), graph.outputs[0].add_(1)))
    call(encoder, [20], times=3)
    assert encoder.stats.replays == {SMALL: 6, exact([20]): 1}
    assert encoder.disabled.keys() == {exact([20])}
    assert encoder.capture_wanted() == []


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_whatever_comes_the_outputs_are_right_and_the_graphs_few(layouts, most):
    encoder = recurring(most=most, budgets=[vg.Budget(96, items=8)])
    for turn in range(12):
        for lengths in layouts[: 1 + turn % len(layouts)]:
            call(encoder, lengths)
        encoder.capture_wanted(1 + turn % 2)
        (graphs,) = encoder.executor.store.sets
        assert len({*graphs.budgets} - {*encoder.budgets}) <= most
    assert not encoder.stats.eager


def test_without_the_option_there_is_nothing_to_capture_between_calls():
    encoder = attention_encoder(BUDGETS)
    with pytest.raises(vg.SpecError, match=re.escape("Capture(lazy=True) or Capture(exact=N)")):
        encoder.capture_wanted()
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(vg.SpecError, match="expected a number of layouts"):
            vg.Capture(exact=wrong)
