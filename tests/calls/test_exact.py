"""`Capture(exact=...)`: graphs of exactly the size of calls, for the sizes that recur."""

import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, rows_for
from tests.support.towers import equal_bits
from varlen_graphs.calls import exact_graphs
from varlen_graphs.routing import recent

BUDGETS = [vg.budgets.Budget(64, items=8), vg.budgets.Budget(128, items=8)]
SMALL, LARGE = BUDGETS
SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


def recurring(most=2, budgets=BUDGETS, **options):
    lazy = options.pop("lazy", False)
    return attention_encoder(budgets, spec=SHAPED, capture=vg.options.Capture(exact=most, lazy=lazy), **options)


def exact(lengths):
    """Return the size of the graph of a layout of some lengths."""
    return vg.budgets.Budget(sum(lengths), items=len(lengths), segments=len(lengths), max_seqlen=max(lengths))


@pytest.fixture
def few_are_recent(monkeypatch):
    """A hundred calls in place of a thousand."""
    for module in (exact_graphs, recent):
        monkeypatch.setattr(module, "RECENT", 100)


def make_wrong(encoder, monkeypatch):
    """Let the only graph of an exact size give wrong outputs."""
    (graphs,) = encoder.executor.store.sets
    (size,) = graphs.exact
    graph = graphs[size]
    right = graph.replay
    monkeypatch.setattr(graph, "replay", lambda: (right(), graph.outputs[0].add_(1)))


def exact_bytes(encoder):
    """Return the bytes of graphs of exact sizes."""
    (graphs,) = encoder.executor.store.sets
    return sum(graphs.bytes()[size] for size in graphs.exact)


def sizes(encoder):
    """Return the sizes that have a graph."""
    return sorted(size for _, size in encoder.executor.store.exact)


def call(encoder, lengths, times=1):
    """Call an encoder and compare with an eager run."""
    for seed in range(times):
        rows = rows_for(lengths, seed=seed)
        torch.testing.assert_close(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))


def test_a_layout_that_recurs_gets_a_graph_of_its_size_between_calls():
    encoder = recurring()
    call(encoder, [20, 13], times=3)
    assert encoder.capture_pending() == []
    call(encoder, [20, 13])
    assert encoder.capture_pending() == [exact([20, 13])]
    assert encoder.capture_pending() == []
    call(encoder, [20, 13])
    assert (encoder.stats.replays, encoder.stats.exact.total()) == ({SMALL: 4}, 1)
    assert (encoder.stats.rows, encoder.stats.padding) == (5 * 33, 4 * (64 - 33))
    assert encoder.budgets == tuple(BUDGETS)
    assert "1 replay of graphs of exactly the size of calls; rows: 33" in encoder.report()
    assert encoder.stats.as_dict()["budgets"][0]["exact"] == 1
    assert (
        'varlen_graphs_budget_exact_total{rows="64",items="8",segments="8",max_seqlen="64"} 1'
        in encoder.stats.prometheus()
    )


def test_its_output_is_that_of_an_eager_run_to_the_bit():
    encoder = recurring()
    call(encoder, [20, 13], times=4)
    encoder.capture_pending()
    rows = rows_for([20, 13], seed=9)
    assert equal_bits(encoder(rows, lengths=[20, 13]), encoder.eager(rows, lengths=[20, 13]))
    assert encoder.stats.exact.total() == 1


def test_calls_of_no_other_size_use_it():
    encoder = recurring()
    call(encoder, [33], times=4)
    encoder.capture_pending()
    for lengths in ([32], [20, 13], [34], [1] * 8):
        call(encoder, lengths)
    assert (encoder.stats.replays, encoder.stats.exact.total()) == ({SMALL: 8}, 0)


def test_layouts_of_one_size_share_it():
    encoder = recurring(most=1)
    for lengths in ([20, 13], [13, 20]):
        call(encoder, lengths, times=2)
    assert encoder.capture_pending(None) == [exact([20, 13])]
    for lengths in ([20, 13], [13, 20]):
        call(encoder, lengths)
    assert encoder.stats.exact.total() == 2


def test_layouts_that_come_much_more_often_take_the_place_of_others():
    encoder = recurring(most=2)
    for lengths in ([10], [11]):
        call(encoder, lengths, times=4)
    assert encoder.capture_pending(None) == [exact([10]), exact([11])]
    call(encoder, [12], times=7)
    assert encoder.capture_pending(None) == []  # hardly more often
    call(encoder, [11], times=3)
    call(encoder, [12])
    assert encoder.capture_pending(None) == [exact([12])]
    assert sizes(encoder) == [exact([11]), exact([12])]
    call(encoder, [10])
    assert not encoder.stats.exact.total() - 3  # those of 11


def test_traffic_that_was_long_ago_counts_little(few_are_recent):
    encoder = recurring(most=1)
    call(encoder, [10], times=40)
    assert encoder.capture_pending() == [exact([10])]
    with torch.no_grad():
        for _ in range(300):
            encoder(rows_for([9]), lengths=[9])
    assert encoder.capture_pending(None) == [exact([9])]
    assert sizes(encoder) == [exact([9])]


def test_released_graphs_come_back():
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_pending()
    encoder.release()
    call(encoder, [20])
    assert encoder.stats.replays[SMALL] == 5
    assert encoder.capture_pending() == [exact([20])]
    call(encoder, [20])
    assert encoder.stats.exact.total() == 1


def test_lazy_encoders_capture_what_calls_requested_first():
    encoder = recurring(lazy=True)
    call(encoder, [20])
    assert encoder.capture_pending(None) == [SMALL]
    call(encoder, [20], times=4)
    assert encoder.capture_pending(None) == [exact([20])]


def test_a_thread_captures_them_in_the_background():
    encoder = recurring()
    call(encoder, [20])
    future = encoder.capture_in_background()
    call(encoder, [20], times=3)
    for _ in range(1000):
        if encoder.stats.exact.total():
            break
        call(encoder, [20])
    future.cancel()
    assert encoder.stats.exact.total()


def test_a_limit_on_memory_comes_first():
    encoder = attention_encoder(BUDGETS, spec=SHAPED).capture()
    limited = recurring(memory=encoder.bytes())
    limited.capture()
    call(limited, [20], times=4)
    before = limited.bytes()
    limited.capture_pending()
    assert limited.bytes() == before <= encoder.bytes()
    assert limited.capture_pending() == []
    call(limited, [20])
    assert not limited.disabled


class Scaled(Attention):
    def forward(self, x, cu_seqlens, max_seqlen, scale=1):
        return super().forward(x, cu_seqlens, max_seqlen) * scale


def test_static_arguments_have_graphs_of_their_own():
    encoder = recurring(module=Scaled())
    rows = rows_for([20])
    for scale in (1, 2):
        for _ in range(4):
            encoder(rows, lengths=[20], scale=scale)
    assert encoder.capture_pending(None) == [exact([20])] * 2
    for scale in (1, 2):
        assert equal_bits(encoder(rows, lengths=[20], scale=scale), encoder.eager(rows, lengths=[20], scale=scale))
    assert encoder.stats.exact.total() == 2


def test_weights_that_changed_are_noticed():
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_pending()
    with torch.no_grad():
        for parameter in encoder.module.parameters():
            parameter.mul_(2)
    call(encoder, [20])
    encoder.module.double()
    with pytest.raises(vg.errors.StaleGraphError):
        encoder(rows_for([20]), lengths=[20])


def test_verification_in_service_stops_a_graph_that_is_wrong(monkeypatch):
    encoder = recurring(verify=2)
    call(encoder, [20], times=4)
    encoder.capture_pending()
    make_wrong(encoder, monkeypatch)
    call(encoder, [20], times=3)
    assert (encoder.stats.replays, encoder.stats.exact.total()) == ({SMALL: 6}, 1)
    assert not encoder.disabled
    assert encoder.capture_pending() == []


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_whatever_comes_the_outputs_are_right_and_the_graphs_few(layouts, most):
    encoder = recurring(most=most, budgets=[vg.budgets.Budget(96, items=8)])
    for turn in range(12):
        for lengths in layouts[: 1 + turn % len(layouts)]:
            call(encoder, lengths)
        encoder.capture_pending(1 + turn % 2)
        assert len(sizes(encoder)) <= most
    assert not encoder.stats.eager


def test_without_the_option_there_is_nothing_to_capture_between_calls():
    encoder = attention_encoder(BUDGETS)
    with pytest.raises(vg.errors.SpecError, match=re.escape("Capture(lazy=True) or Capture(exact=N)")):
        encoder.capture_pending()
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(vg.errors.SpecError, match="expected a number of graphs"):
            vg.options.Capture(exact=wrong)


def test_graphs_of_all_static_arguments_together_are_no_more_than_asked_for():
    encoder = recurring(module=Scaled())
    for scale in (1, 2):
        for lengths in ([20], [30]):
            for _ in range(4):
                encoder(rows_for(lengths), lengths=lengths, scale=scale)
    assert len(encoder.capture_pending(None)) == len(sizes(encoder)) == 2


def test_the_size_of_a_budget_needs_no_graph_of_its_own():
    encoder = recurring(budgets=[*BUDGETS, exact([32])])
    call(encoder, [32], times=8)
    assert encoder.capture_pending(None) == []
    encoder.drop_budget(exact([32]))
    assert encoder.capture_pending(None) == [exact([32])]
    encoder.add_budget(exact([32]))
    call(encoder, [32])
    assert sizes(encoder) == []
    assert encoder.stats.exact.total() == 0


def test_a_capture_inside_of_a_stage_is_refused_and_made_later():
    encoder = recurring()
    call(encoder, [20], times=4)
    with encoder.stage([20]) as stage:
        stage.rows.copy_(rows_for([20]))
        with pytest.raises(vg.errors.InputError, match="stage"):
            encoder.capture_pending()
    assert equal_bits(stage.output, encoder(rows_for([20]), lengths=[20]))
    assert encoder.capture_pending() == [exact([20])]


def test_a_size_that_cannot_be_captured_is_left_out_with_a_warning_and_others_are_not():
    class Failing(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if len(x) == 20 and len(cu_seqlens) == 2 and self.captured:
                raise ValueError("not of this size")
            return super().forward(x, cu_seqlens, max_seqlen)

    Failing.captured = False
    encoder = recurring(module=Failing())
    for lengths in ([20], [30], [31]):
        call(encoder, lengths, times=4 + (lengths == [20]))
    Failing.captured = True
    with pytest.warns(UserWarning, match="no graph of exactly 20 rows could be captured.*not of this size"):
        assert encoder.capture_pending(None) == [exact([20]), exact([30]), exact([31])]
    assert sizes(encoder) == [exact([30]), exact([31])]
    assert encoder.capture_pending(None) == []
    encoder(rows_for([20]), lengths=[20])
    assert not encoder.disabled


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_that_fails_the_proof_is_not_used_and_budgets_go_on(strict):
    class Wrong(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            y = super().forward(x, cu_seqlens, max_seqlen)
            return y + x.nan_to_num().mean() if len(x) == 33 and max_seqlen == 20 else y

    encoder = recurring(module=Wrong(), verify=vg.options.Verify(strict=strict))
    encoder(rows_for([6]), lengths=[6])
    for _ in range(4):
        encoder(rows_for([20, 13]), lengths=[20, 13])
    if strict:
        with pytest.raises(vg.errors.VerificationError, match="1 of 1 graph"):
            encoder.capture_pending()
    else:
        with pytest.warns(UserWarning, match="failed verification"):
            encoder.capture_pending()
    assert encoder.capture_pending() == []
    call(encoder, [20])
    assert (encoder.stats.replays.total(), encoder.stats.exact.total(), encoder.stats.eager) == (6, 0, {})


def test_rows_of_another_shape_after_a_release_are_captured_so():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    spec = vg.BufferSpec(rows="x", layout=vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Double().eval(), BUDGETS, spec, backend="tape", capture=vg.options.Capture(exact=1))
    for width in (8, 16):
        rows = torch.randn(20, width)
        for _ in range(8):
            encoder(rows, lengths=[20])
        assert len(encoder.capture_pending(None)) == 1
        assert equal_bits(encoder(rows, lengths=[20]), rows * 2)
        encoder.release()
    assert encoder.stats.exact.total() == 2


def test_traffic_that_shifts_for_good_leaves_nothing_behind():
    encoder = recurring(most=1, verify=1)
    for length in range(2, 9):
        call(encoder, [length], times=2**length)
        encoder.capture_pending(None)
    assert len(sizes(encoder)) == 1
    assert {*encoder.stats.replays} | {*encoder.stats.checked} <= {*BUDGETS}


def test_a_warmup_file_requests_the_budgets_that_hold_these_sizes(tmp_path):
    encoder = recurring(lazy=True)
    call(encoder, [20], times=4)
    assert encoder.capture_pending(None) == [SMALL, exact([20])]
    call(encoder, [20], times=4)
    assert not encoder.stats.replays
    encoder.save_warmup(tmp_path / "warmup.json")
    options = vg.options.Capture(lazy=True, warmup=tmp_path / "warmup.json")
    again = attention_encoder(BUDGETS, spec=SHAPED, capture=options)
    assert again.capture_pending(None) == [SMALL]


def test_calls_of_items_that_only_the_device_has_seen_use_budgets():
    encoder = recurring()
    for _ in range(8):
        encoder(rows_for([20]), lengths=torch.tensor([20]))
    assert encoder.capture_pending(None) == []
    assert encoder.stats.replays.total() == 8


def test_graphs_of_exact_sizes_are_not_compiled():
    with pytest.raises(vg.errors.SpecError, match="which are not compiled"):
        vg.options.Capture(exact=1, compile=True)


def test_a_key_that_was_quiet_for_long_is_captured_again_after_its_graphs_went(few_are_recent):
    encoder = recurring(most=1)
    call(encoder, [20], times=4)
    encoder.capture_pending()
    with torch.no_grad():
        for _ in range(300):
            encoder(rows_for([9]), lengths=[9])
    call(encoder, [20], times=4)
    encoder.add_budget(vg.budgets.Budget(256, items=16))  # in a larger arena
    call(encoder, [20], times=4)
    assert encoder.capture_pending() == [exact([9])]


def test_what_a_graph_held_goes_with_it():
    class Shifted(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            return super().forward(x + torch.tensor([0.5] * 8).to(x.device), cu_seqlens, max_seqlen)

    encoder = recurring(most=1, module=Shifted())
    held = []
    for length in range(10, 14):
        call(encoder, [length], times=4 * 2 ** (length - 10))
        assert encoder.capture_pending(None) == [exact([length])]
        (graphs,) = encoder.executor.store.sets
        held.append(len(graphs.read))
    assert len({*held}) == 1


def limited(graphs, **options):
    """Return an encoder with room for its budgets and so many graphs of exact sizes."""
    free = recurring(most=4).capture()
    before = free.bytes()
    call(free, [60], times=4)
    free.capture_pending()
    return recurring(memory=before + int((graphs + 0.5) * (free.bytes() - before)), **options).capture()


def test_where_memory_is_short_a_size_that_comes_more_often_takes_the_place_of_another():
    encoder = limited(graphs=1, most=4)
    call(encoder, [60], times=4)
    assert encoder.capture_pending(None) == [exact([60])]
    call(encoder, [59], times=7)
    assert encoder.capture_pending(None) == []
    call(encoder, [59])
    assert encoder.capture_pending(None) == [exact([59])]
    assert sizes(encoder) == [exact([59])]
    assert len(encoder.executor.store) == 2


def test_where_memory_is_full_nothing_is_captured_in_vain():
    encoder = limited(graphs=0, most=4)
    for length in (20, 30, 40):
        call(encoder, [length], times=4)
    assert encoder.capture_pending(None) == []
    assert not encoder.disabled


def test_budgets_that_lazy_calls_request_come_before_graphs_of_exact_sizes():
    def captured(most):
        encoder = recurring(most=most, lazy=True, memory=room)
        for length in (100, 101, 20):
            for _ in range(40):
                encoder(rows_for([length]), lengths=[length])
                encoder.capture_pending(None)
        (graphs,) = encoder.executor.store.sets
        return sorted(graphs.budgets)

    both = recurring().capture()
    room = both.bytes() + both.executor.store.own_bytes()[LARGE]  # which an admission asks for
    assert captured(0) == captured(4) == BUDGETS


def test_an_interrupt_leaves_no_size_out_and_no_graph_too_many(monkeypatch):
    encoder = recurring(most=1)
    call(encoder, [20], times=4)
    store = encoder.executor.store
    for name in ("check_graphs", "capture_exact"):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                encoder.capture_pending()
        assert sizes(encoder) == []
    assert encoder.capture_pending(None) == sizes(encoder) == [exact([20])]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_graph_found_wrong_in_service_is_counted_and_not_captured_again(monkeypatch):
    encoder = recurring(verify=2)
    call(encoder, [20], times=4)
    encoder.capture_pending()
    make_wrong(encoder, monkeypatch)
    call(encoder, [20])
    assert encoder.stats.wrong == {exact([20]): 1}
    call(encoder, [30], times=4)
    call(encoder, [20], times=40)
    assert encoder.capture_pending(None) == sizes(encoder) == [exact([30])]


def test_verify_replays_calls_in_the_graph_of_their_size(monkeypatch):
    encoder = recurring()
    call(encoder, [20], times=4)
    encoder.capture_pending()
    example = {"x": rows_for([20]), "lengths": [20]}
    assert encoder.verify([example]).budgets == (exact([20]), *BUDGETS)
    make_wrong(encoder, monkeypatch)
    with pytest.raises(vg.errors.VerificationError, match="rows=20"):
        encoder.verify([example])


def test_the_budget_that_frequent_calls_would_use_is_not_evicted():
    budgets = [*BUDGETS, vg.budgets.Budget(96, items=8)]
    encoder = recurring(budgets=budgets, memory="1GiB").capture()
    call(encoder, [90], times=4)
    encoder.capture_pending()
    call(encoder, [90], times=40)
    call(encoder, [50], times=10)
    encoder.executor.store.limit.most = encoder.bytes() - 1 - exact_bytes(encoder)
    encoder.add_budget(vg.budgets.Budget(32, items=8))
    assert encoder.stats.evicted
    assert vg.budgets.Budget(96, items=8) not in encoder.disabled


def test_the_thread_captures_what_an_earlier_capture_left():
    encoder = recurring()
    for length in (20, 21):
        call(encoder, [length], times=4)
    assert len(encoder.capture_pending(1)) == 1
    future = encoder.capture_in_background()
    for _ in range(200):
        if len(sizes(encoder)) == 2:
            break
        time.sleep(0.05)
    future.cancel()
    assert sizes(encoder) == [exact([20]), exact([21])]


def test_calls_that_no_budget_holds_go_on_as_declared():
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
    budgets = [vg.budgets.Budget(64, items=8, max_seqlen=16)]
    encoder = attention_encoder(budgets, spec=spec, capture=vg.options.Capture(exact=2), on_miss="error")
    call(encoder, [10])
    for _ in range(5):
        with pytest.raises(vg.errors.BudgetError):
            encoder(rows_for([20]), lengths=[20])
    assert encoder.capture_pending(None) == []


def test_weights_that_changed_are_reported_by_the_next_capture_alone():
    encoder = recurring()
    call(encoder, [20], times=3)
    encoder.module.double()
    assert encoder.capture_pending() == []
