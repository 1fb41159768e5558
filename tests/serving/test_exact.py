"""Graphs of exactly the size of calls, for the sizes that recur."""

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


def sizes(encoder):
    """Return the sizes that have a graph."""
    return sorted(size for graphs in encoder.executor.store.capturer.exact.values() for size in graphs.budgets)


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
    assert (encoder.stats.replays, encoder.stats.exact_replays) == ({SMALL: 4}, 1)
    assert (encoder.stats.rows, encoder.stats.padding) == (5 * 33, 4 * (64 - 33))
    assert encoder.budgets == tuple(BUDGETS)
    assert "1 replay of graphs of exactly the size of calls; rows: 33" in encoder.report()
    assert encoder.stats.as_dict()["exact_replays"] == 1
    assert "varlen_graphs_exact_replays_total 1" in encoder.stats.prometheus()


def test_its_output_is_that_of_an_eager_run_to_the_bit():
    encoder = recurring()
    call(encoder, [20, 13], times=4)
    encoder.capture_wanted()
    rows = rows_for([20, 13], seed=9)
    assert equal_bits(encoder(rows, lengths=[20, 13]), encoder.eager(rows, lengths=[20, 13]))
    assert encoder.stats.exact_replays == 1


def test_calls_of_no_other_size_use_it():
    encoder = recurring()
    call(encoder, [33], times=4)
    encoder.capture_wanted()
    for lengths in ([32], [20, 13], [34], [1] * 8):
        call(encoder, lengths)
    assert (encoder.stats.replays, encoder.stats.exact_replays) == ({SMALL: 8}, 0)


def test_layouts_of_one_size_share_it():
    encoder = recurring(most=1)
    for lengths in ([20, 13], [13, 20]):
        call(encoder, lengths, times=2)
    assert encoder.capture_wanted(None) == [exact([20, 13])]
    for lengths in ([20, 13], [13, 20]):
        call(encoder, lengths)
    assert encoder.stats.exact_replays == 2


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
    assert sizes(encoder) == [exact([11]), exact([12])]
    call(encoder, [10])
    assert not encoder.stats.exact_replays - 3  # those of 11


def test_traffic_that_was_long_ago_counts_little():
    encoder = recurring(most=1)
    call(encoder, [10], times=40)
    assert encoder.capture_wanted() == [exact([10])]
    with torch.no_grad():
        for _ in range(3000):
            encoder(rows_for([9]), lengths=[9])
    assert encoder.capture_wanted(None) == [exact([9])]
    assert sizes(encoder) == [exact([9])]


def test_released_graphs_come_back():
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_wanted()
    encoder.release()
    call(encoder, [20])
    assert encoder.stats.replays[SMALL] == 5
    assert encoder.capture_wanted() == [exact([20])]
    call(encoder, [20])
    assert encoder.stats.exact_replays == 1


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
        if encoder.stats.exact_replays:
            break
        call(encoder, [20])
    future.cancel()
    assert encoder.stats.exact_replays


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
    assert encoder.stats.exact_replays == 2


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
    (graphs,) = encoder.executor.store.capturer.exact.values()
    graph = graphs[exact([20])]
    right = graph.replay
    monkeypatch.setattr(graph, "replay", lambda: (right(), graph.outputs[0].add_(1)))
    call(encoder, [20], times=3)
    assert (encoder.stats.replays, encoder.stats.exact_replays) == ({SMALL: 6}, 1)
    assert not encoder.disabled
    assert encoder.capture_wanted() == []


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_whatever_comes_the_outputs_are_right_and_the_graphs_few(layouts, most):
    encoder = recurring(most=most, budgets=[vg.Budget(96, items=8)])
    for turn in range(12):
        for lengths in layouts[: 1 + turn % len(layouts)]:
            call(encoder, lengths)
        encoder.capture_wanted(1 + turn % 2)
        assert len(sizes(encoder)) <= most
    assert not encoder.stats.eager


def test_without_the_option_there_is_nothing_to_capture_between_calls():
    encoder = attention_encoder(BUDGETS)
    with pytest.raises(vg.SpecError, match=re.escape("Capture(lazy=True) or Capture(exact=N)")):
        encoder.capture_wanted()
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(vg.SpecError, match="expected a number of graphs"):
            vg.Capture(exact=wrong)


def test_graphs_of_all_static_arguments_together_are_no_more_than_asked_for():
    class Scaled(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, scale=1):
            return super().forward(x, cu_seqlens, max_seqlen) * scale

    encoder = vg.GraphedEncoder(Scaled(8).eval(), BUDGETS, SHAPED, backend="tape", capture=vg.Capture(exact=2))
    for scale in (1, 2):
        for lengths in ([20], [30]):
            for _ in range(4):
                encoder(rows_for(lengths), lengths=lengths, scale=scale)
    assert len(encoder.capture_wanted(None)) == len(sizes(encoder)) == 2


def test_the_size_of_a_budget_needs_no_graph_of_its_own():
    encoder = recurring(budgets=[*BUDGETS, exact([32])])
    call(encoder, [32], times=8)
    assert encoder.capture_wanted(None) == []
    encoder.drop_budget(exact([32]))
    assert encoder.capture_wanted(None) == [exact([32])]
    encoder.add_budget(exact([32]))
    call(encoder, [32])
    assert encoder.stats.exact_replays == 1


def test_a_capture_inside_of_a_stage_is_refused_and_made_later():
    encoder = recurring()
    call(encoder, [20], times=4)
    with encoder.stage([20]) as stage:
        stage.rows.copy_(rows_for([20]))
        with pytest.raises(vg.InputError, match="stage"):
            encoder.capture_wanted()
    assert equal_bits(stage.output, encoder(rows_for([20]), lengths=[20]))
    assert encoder.capture_wanted() == [exact([20])]


def test_a_size_that_cannot_be_captured_is_left_out_with_a_warning_and_others_are_not():
    class Failing(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if len(x) == 20 and len(cu_seqlens) == 2 and self.captured:
                raise ValueError("not of this size")
            return super().forward(x, cu_seqlens, max_seqlen)

    Failing.captured = False
    encoder = vg.GraphedEncoder(Failing(8).eval(), BUDGETS, SHAPED, backend="tape", capture=vg.Capture(exact=2))
    for lengths in ([20], [30], [31]):
        call(encoder, lengths, times=4 + (lengths == [20]))
    Failing.captured = True
    with pytest.warns(UserWarning, match="no graph of exactly 20 rows could be captured.*not of this size"):
        assert encoder.capture_wanted(None) == [exact([20]), exact([30]), exact([31])]
    assert sizes(encoder) == [exact([30]), exact([31])]
    assert encoder.capture_wanted(None) == []
    encoder(rows_for([20]), lengths=[20])
    assert not encoder.disabled


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_that_fails_the_proof_is_not_used_and_budgets_go_on(strict):
    class Wrong(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            y = super().forward(x, cu_seqlens, max_seqlen)
            return y + x.nan_to_num().mean() if len(x) == 33 and max_seqlen == 20 else y

    encoder = vg.GraphedEncoder(
        Wrong(8).eval(), BUDGETS, SHAPED, backend="tape", capture=vg.Capture(exact=2), verify=vg.Verify(strict=strict)
    )
    for _ in range(4):
        encoder(rows_for([20, 13]), lengths=[20, 13])
    if strict:
        with pytest.raises(vg.VerificationError, match="1 of 1 graph"):
            encoder.capture_wanted()
    else:
        with pytest.warns(UserWarning, match="failed the proof"):
            encoder.capture_wanted()
    assert encoder.capture_wanted() == []
    call(encoder, [20])
    assert (encoder.stats.replays.total(), encoder.stats.exact_replays, encoder.stats.eager) == (5, 0, {})


def test_rows_of_another_shape_after_a_release_are_captured_so():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    spec = vg.BufferSpec(rows="x", layout=vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Double().eval(), BUDGETS, spec, backend="tape", capture=vg.Capture(exact=1))
    for width in (8, 16):
        rows = torch.randn(20, width)
        for _ in range(8):
            encoder(rows, lengths=[20])
        assert len(encoder.capture_wanted(None)) == 1
        assert equal_bits(encoder(rows, lengths=[20]), rows * 2)
        encoder.release()
    assert encoder.stats.exact_replays == 2


def test_traffic_that_shifts_for_good_leaves_nothing_behind():
    encoder = recurring(most=1, verify=1)
    for length in range(2, 9):
        call(encoder, [length], times=2**length)
        encoder.capture_wanted(None)
    assert len(sizes(encoder)) == 1
    (graphs,) = encoder.executor.store.capturer.exact.values()
    assert len(graphs.places) == 1
    assert {*encoder.stats.replays} | {*encoder.stats.checked} <= {*BUDGETS}


def test_a_warmup_file_requests_the_budgets_that_hold_these_sizes(tmp_path):
    encoder = recurring(lazy=True)
    call(encoder, [20], times=4)
    assert encoder.capture_wanted(None) == [SMALL, exact([20])]
    call(encoder, [20], times=4)
    assert not encoder.stats.replays
    encoder.save_warmup(tmp_path / "warmup.json")
    options = vg.Capture(lazy=True, warmup=tmp_path / "warmup.json")
    again = attention_encoder(BUDGETS, spec=SHAPED, capture=options)
    assert again.capture_wanted(None) == [SMALL]


def test_calls_of_items_that_only_the_device_has_seen_use_budgets():
    encoder = recurring()
    for _ in range(8):
        encoder(rows_for([20]), lengths=torch.tensor([20]))
    assert encoder.capture_wanted(None) == []
    assert encoder.stats.replays.total() == 8


def test_graphs_of_exact_sizes_are_not_compiled():
    with pytest.raises(vg.SpecError, match="which are not compiled"):
        vg.Capture(exact=1, compile=True)
