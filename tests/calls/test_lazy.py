"""`GraphedEncoder` in a server: graphs are captured between calls, come, go and are limited, while calls go on."""

import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import (
    UNVERIFIED,
    Attention,
    attention_encoder,
    attention_spec,
    captured,
    check,
    rows_for,
    wait_for,
)
from tests.support.forked_scripts import run_script
from tests.support.threads import run_in_threads
from tests.support.towers import distance, equal_bits
from varlen_graphs.attention import timing
from varlen_graphs.capture.tape import Tape
from varlen_graphs.routing import recent

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
SIZES = (32, 96, 160, 256)
"""Other numbers of rows than those that a module is looked at with first."""
BUDGETS = tuple(vg.budgets.Budget(rows, items=8) for rows in SIZES)
SMALL, LARGEST = BUDGETS[0], BUDGETS[-1]


def lazy_encoder(**options):
    usual = {"budgets": BUDGETS, "spec": SHAPED, "capture": vg.options.Capture(lazy=True), "verify": UNVERIFIED}
    return attention_encoder(**usual | options)


# Lazy capture


@pytest.mark.parametrize("unseen", [False, True])
def test_no_call_captures_and_what_calls_wanted_is_captured_between_them(unseen):
    encoder = lazy_encoder()
    for _ in range(3):
        check(encoder, [20], unseen)
    check(encoder, [100], unseen)
    assert not captured(encoder)
    assert encoder.stats.eager == {"not captured yet": 4}
    assert encoder.capture_pending() == [SMALL]  # the most wanted
    assert captured(encoder) == {SMALL, LARGEST}  # which sizes the memory
    check(encoder, [20], unseen)
    assert encoder.stats.replays == {SMALL: 1}
    assert encoder.capture_pending(most=None) == [BUDGETS[2]]
    assert encoder.capture_pending() == []
    check(encoder, [100], unseen)
    assert encoder.stats.replays == {SMALL: 1, BUDGETS[2]: 1}
    assert encoder.stats.eager.total() == 4


@pytest.mark.parametrize("unseen", [False, True])
def test_another_budget_stands_in_where_it_costs_little_more(unseen):
    encoder = lazy_encoder(budgets=[32, 512, 640])
    check(encoder, [600], unseen)
    encoder.capture_pending()
    check(encoder, [500], unseen)
    assert encoder.stats.replays == {encoder.budgets[2]: 1}
    assert encoder.capture_pending() == [encoder.budgets[1]]  # and is wanted nevertheless
    check(encoder, [20], unseen)  # no budget that is there is close
    assert encoder.stats.eager == {"not captured yet": 2}


def test_what_stands_in_is_faster_than_eager_where_times_are_known():
    encoder = lazy_encoder(budgets=[512, 1024])
    check(encoder, [1000])
    encoder.capture_pending()
    for host, replays in ((100.0, 1), (0.5, 0)):
        costs = vg.routing.Costs({encoder.budgets[0]: 1.0, encoder.budgets[1]: 3.0}, host=host)
        encoder.costs = costs
        before = encoder.stats.replays.total()
        check(encoder, [500])
        assert encoder.stats.replays.total() - before == replays


def test_a_lazy_encoder_captures_everything_when_it_is_told_to():
    encoder = lazy_encoder().capture()
    assert captured(encoder) == set(BUDGETS)
    assert encoder.capture_pending() == []
    check(encoder, [20])
    assert not encoder.stats.eager


def test_an_encoder_that_is_not_lazy_says_so():
    encoder = attention_encoder()
    for method in (encoder.capture_pending, encoder.capture_in_background):
        with pytest.raises(vg.errors.SpecError, match="lazy=True"):
            method()


def test_each_set_of_static_arguments_has_graphs_of_its_own():
    encoder = lazy_encoder()
    check(encoder, [20])
    check(encoder, [20], scale=2.0)
    check(encoder, [20], scale=2.0)
    encoder.capture_pending()
    check(encoder, [20], scale=2.0)
    check(encoder, [20])
    assert encoder.stats.eager == {"not captured yet": 4}
    encoder.capture_pending()
    check(encoder, [20])
    assert encoder.stats.replays == {SMALL: 2}
    assert repr(encoder).endswith("4 captured)")


def test_a_stage_does_not_wait_for_a_capture():
    encoder = lazy_encoder()
    for count in range(2):
        rows = rows_for([20])
        with encoder.stage([20]) as stage:
            stage.rows.copy_(rows)
            if count:
                with pytest.raises(vg.errors.InputError, match=r"inside `with encoder\.stage"):
                    encoder.capture_pending(most=None)
            else:
                encoder(rows_for([100]), lengths=[100])
        assert distance(stage.output, encoder.eager(rows, lengths=[20])) < 1e-6
        if not count:
            encoder.capture_pending()
            check(encoder, [100])
    assert encoder.stats.replays[SMALL] == 1


def test_nothing_is_captured_in_another_state_than_that_of_construction():
    encoder = lazy_encoder()
    check(encoder, [20])
    encoder.module.train()
    assert encoder.capture_pending() == []
    encoder.module.eval()
    with torch.autocast("cpu", torch.bfloat16):  # of this thread, and not of the encoder
        assert encoder.capture_pending() == [SMALL]
    check(encoder, [20])
    assert encoder.stats.replays.total() == 1


def test_released_graphs_are_captured_again_between_calls():
    encoder = lazy_encoder()
    check(encoder, [20])
    encoder.capture_pending()
    encoder.release()
    check(encoder, [20])
    assert not captured(encoder)
    assert encoder.capture_pending() == [SMALL]
    check(encoder, [20])
    assert encoder.stats.replays.total() == 1


def test_weights_that_moved_are_told_between_calls_and_in_them():
    encoder = lazy_encoder()
    check(encoder, [20])
    encoder.capture_pending()
    check(encoder, [100])
    encoder.module.qkv.weight.data = encoder.module.qkv.weight.data.clone()
    with pytest.raises(vg.errors.StaleGraphError, match="was moved or replaced"):
        encoder.capture_pending()
    with pytest.raises(vg.errors.StaleGraphError, match="was moved or replaced"):
        encoder(rows_for([20]), lengths=[20])
    encoder.release()
    assert encoder.capture_pending() == [BUDGETS[2]]


def test_with_recapture_calls_go_on_over_weights_that_moved():
    encoder = lazy_encoder(capture=vg.options.Capture(lazy=True, on_change="recapture"))
    check(encoder, [20])
    encoder.capture_pending()
    encoder.module.qkv.weight.data = encoder.module.qkv.weight.data * 2
    for _ in range(2):
        check(encoder, [20])
    assert not captured(encoder)  # no call captures
    encoder.capture_pending()
    check(encoder, [20])
    assert encoder.stats.replays[SMALL] == 1


def test_replays_are_checked_as_soon_as_there_are_any():
    encoder = lazy_encoder(verify=1)
    check(encoder, [20])
    assert not encoder.stats.checked
    encoder.capture_pending()
    for _ in range(3):
        check(encoder, [20])
    assert encoder.stats.checked == {SMALL: 1}


def test_verify_captures_what_it_proves():
    encoder = lazy_encoder()
    verified = encoder.verify([{"x": rows_for([20]), "lengths": [20]}])
    assert verified.budgets == BUDGETS


def test_what_fails_is_told_to_whoever_captures_and_calls_go_on_eager():
    class Failing(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if len(x) in self.sizes and len(cu_seqlens) > 2:  # at a budget
                raise ValueError("no grid of so many blocks")
            return super().forward(x, cu_seqlens, max_seqlen)

    module = Failing()
    module.sizes = SIZES
    encoder = lazy_encoder(module=module)
    check(encoder, [20])
    with pytest.raises(vg.errors.CaptureError, match="no grid of so many blocks"):
        encoder.capture_pending()
    check(encoder, [20])
    assert "nothing could be captured: ValueError: no grid of so many blocks" in encoder.report()
    future = encoder.capture_in_background()
    assert isinstance(future.exception(60), vg.errors.CaptureError)
    check(encoder, [20])
    module.sizes = (32,)
    with pytest.warns(UserWarning, match="32 rows could not be captured, and the budget is disabled"):
        assert encoder.capture_pending() == [SMALL]
    assert encoder.capture_pending() == []
    check(encoder, [20])
    assert encoder.stats.eager == {"not captured yet": 3}
    assert encoder.stats.replays == {LARGEST: 1}
    assert encoder.capture_pending() == [BUDGETS[1]]
    check(encoder, [20])
    assert encoder.stats.replays == {LARGEST: 1, BUDGETS[1]: 1}


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("call"), LENGTHS, st.booleans(), st.sampled_from([1.0, 2.0])),
    st.tuples(st.sampled_from(["wanted", "release", "capture", "poison"])),
)


@settings(max_examples=20)
@given(st.lists(STEPS, max_size=8))
def test_whatever_comes_between_calls_they_are_right(steps):
    encoder = lazy_encoder()
    for name, *rest in steps:
        if name == "call":
            check(encoder, rest[0], rest[1], scale=rest[2])
        elif name == "wanted":
            encoder.capture_pending()
        else:
            getattr(encoder, name)()
    encoder.check()


# Capture in the background


class Held(Attention):
    """Holds every run of so many rows until it may go on."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.begun, self.go_on = threading.Event(), threading.Event()

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        if len(x) == self.rows:
            self.begun.set()
            assert self.go_on.wait(60)
        return super().forward(x, cu_seqlens, max_seqlen, scale)


def test_calls_go_on_while_a_thread_captures_what_they_want():
    module = Held(160)
    encoder = lazy_encoder(module=module)
    future = encoder.capture_in_background()
    assert encoder.capture_in_background() is future
    check(encoder, [20])
    wait_for(encoder, [SMALL])
    check(encoder, [20])
    assert encoder.stats.replays == {SMALL: 1}
    check(encoder, [100])
    module.begun.wait(60)
    replayed = encoder.stats.replays.copy()
    for unseen in (False, True):
        check(encoder, [20], unseen)  # does not wait, though its graph is there
    with encoder.stage([20]) as stage:
        stage.rows.copy_(rows_for([20]))
    assert encoder.stats.eager["a graph was being captured"] == 3
    assert encoder.stats.replays == replayed
    module.go_on.set()
    wait_for(encoder, [BUDGETS[2]])
    assert not future.done()
    future.cancel()


def test_calls_do_not_wait_for_captures_of_another_encoder_of_the_pool():
    module, pool = Held(160), vg.options.Pool()
    capturing, calling = lazy_encoder(module=module, pool=pool), lazy_encoder(pool=pool)
    check(calling, [20])
    calling.capture_pending()
    module.go_on.set()
    check(capturing, [100])
    module.begun.clear()
    module.go_on.clear()
    future = capturing.capture_in_background()
    module.begun.wait(60)
    for unseen in (False, True):
        check(calling, [20], unseen)  # does not wait, though its graph is there
    with calling.stage([20]) as stage:
        stage.rows.copy_(rows_for([20]))
    assert calling.stats.eager["a graph was being captured"] == 3
    assert not calling.stats.replays
    module.go_on.set()
    wait_for(capturing, [BUDGETS[2]])
    with pool.exclusive():  # the capture is over
        check(calling, [20])
    assert calling.stats.replays == {SMALL: 1}
    future.cancel()


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "two pools"])
def test_a_capture_inside_of_another_one_is_refused_and_ends_neither(shared):
    """As of an encoder inside of a module."""
    pool, busy = vg.options.Pool(), []

    class Outer(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
            if inner is not None and not busy:
                busy.append(pool.busy)
                with pytest.raises(
                    vg.errors.CaptureError, match="the encoder of Attention was called inside of Outer, which"
                ):
                    inner.capture()
                busy.append(pool.busy)
            return super().forward(x, cu_seqlens, max_seqlen, scale)

    inner, encoder = None, lazy_encoder(module=Outer(), pool=pool)
    check(encoder, [20])
    inner = lazy_encoder(pool=pool if shared else vg.options.Pool())
    encoder.capture_pending()
    assert busy == [True, True]
    check(encoder, [20])
    assert encoder.stats.replays == {SMALL: 1}
    inner.capture()


def test_a_thread_that_cannot_start_is_started_by_the_next_call(monkeypatch):
    encoder, start = lazy_encoder(), threading.Thread.start

    def fail(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        encoder.capture_in_background()
    future = encoder.capture_in_background()
    check(encoder, [20])
    wait_for(encoder, [SMALL])
    future.cancel()


def test_a_capture_in_the_background_that_fails_is_logged_once_and_counted(caplog):
    class Fails(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if len(x) in {budget.rows for budget in BUDGETS}:  # no call is as large
                raise RuntimeError("no such kernel")
            return super().forward(x, cu_seqlens, max_seqlen)

    encoder = lazy_encoder(module=Fails())
    assert encoder.stats.as_dict()["capture_failure"] is None
    for at in range(1, 3):
        check(encoder, [20])
        error = encoder.capture_in_background().exception(60)
        assert "no such kernel" in str(error)
        assert encoder.stats.capture_failures == at
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.name == "varlen_graphs"
    assert "captures of Fails in the background have ended: RuntimeError: no such kernel" in record.getMessage()
    now = json.loads(json.dumps(encoder.stats.as_dict()))
    assert (now["capture_failures"], now["capture_failure"][:28]) == (2, "RuntimeError: no such kernel")
    assert "varlen_graphs_capture_failures_total 2" in encoder.stats.prometheus()
    assert "captures in the background were ended by 2 errors, the last: RuntimeError: no such" in encoder.report()


def test_a_thread_that_is_cancelled_has_not_failed(caplog):
    encoder = lazy_encoder()
    encoder.capture_in_background().cancel()
    check(encoder, [20])
    assert not encoder.stats.capture_failures
    assert not caplog.records


def test_a_thread_that_captures_ends_when_it_is_cancelled_and_with_its_encoder():
    encoder = lazy_encoder()
    future = encoder.capture_in_background()
    (thread,) = [one for one in threading.enumerate() if getattr(one, "future", None) is future]
    assert future.cancel()
    thread.join(60)
    assert not thread.is_alive()
    again = encoder.capture_in_background()
    check(encoder, [20])
    wait_for(encoder, [SMALL])
    with encoder.pool.exclusive():  # nothing is at work
        alive = weakref.ref(encoder.executor.store)
        del encoder
    gc.collect()
    assert again.result(60) is None
    assert alive() is None


def test_threads_that_call_capture_and_release_at_once_get_right_outputs_and_no_call_captures():
    capturing, calling, wrong = set(), set(), []

    class Spied(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if max_seqlen == len(x):  # never that of a call of two items
                capturing.add(threading.get_ident())
            return super().forward(x, cu_seqlens, max_seqlen)

    encoder = lazy_encoder(module=Spied())
    future = encoder.capture_in_background()

    def work(seed):
        if seed:
            calling.add(threading.get_ident())
        for i in range(30):
            if seed == 0:
                (encoder.release, encoder.capture_pending, encoder.check)[i % 3]()
                continue
            lengths = [1 + (seed * 7 + i * 5) % 90, 1 + i]
            rows = rows_for(lengths, seed)
            got = encoder(rows, lengths=torch.tensor(lengths) if i % 2 else lengths)
            if distance(got, encoder.eager(rows, lengths=lengths)) > 1e-5:
                wrong.append((seed, i))

    run_in_threads(work)
    assert not wrong
    assert capturing
    assert not capturing & calling
    assert not future.done()
    future.cancel()


def test_the_interpreter_ends_quietly_while_a_thread_captures():
    printed, errors = run_script("""
    encoder = attention_encoder(spec=spec, module=Slow(), capture=vg.options.Capture(lazy=True))
    waiting = attention_encoder(spec=spec, capture=vg.options.Capture(lazy=True))
    encoder(rows, lengths=[6])
    futures = [one.capture_in_background() for one in (encoder, waiting)]
    Slow.capturing.wait()
    with waiting.pool.exclusive():
        waiting(rows, lengths=[6])
    stage = waiting.stage([6])
    writing = stage.__enter__()  # a block that nobody leaves
    print("ready", flush=True)
    """)
    assert printed == ["ready"]
    assert "Exception" not in errors
    assert "Error" not in errors


def test_replays_of_the_same_budget_give_the_same_bits_however_it_was_captured():
    at_once, later = attention_encoder(BUDGETS, spec=SHAPED).capture(), lazy_encoder()
    check(later, [20])
    later.capture_pending()
    rows = rows_for([20])
    assert equal_bits(at_once(rows, lengths=[20]), later(rows, lengths=[20]))


# Budgets that come and go


@pytest.mark.parametrize("lazy", [False, True])
def test_budgets_come_and_go_while_serving(lazy):
    encoder = lazy_encoder(budgets=BUDGETS[1:3], capture=vg.options.Capture(lazy=lazy))

    def fill():
        if lazy:
            encoder.capture_pending(None)

    for _ in range(2):
        check(encoder, [90])
        fill()
    check(encoder, [20])
    arena = encoder.executor.store.arena
    assert encoder.add_budget(SMALL) == SMALL
    assert encoder.budgets == BUDGETS[:3]
    check(encoder, [20])
    fill()
    check(encoder, [20])
    assert encoder.stats.replays[SMALL] == (1 if lazy else 2)
    assert encoder.executor.store.arena is arena
    encoder.add_budget(LARGEST)
    assert len(encoder.executor.store.arena.rows) == 256
    assert captured(encoder) >= {SMALL, BUDGETS[1]}  # again
    check(encoder, [250])
    fill()
    check(encoder, [250])
    assert encoder.stats.replays[LARGEST] >= 1
    encoder.drop_budget(SMALL)
    check(encoder, [20])
    assert SMALL not in captured(encoder)
    encoder.drop_budget(LARGEST)
    check(encoder, [250])
    assert encoder.stats.eager["larger than every budget"] == 1
    encoder.release()
    check(encoder, [90])
    assert encoder.budgets == BUDGETS[1:3]


def test_budgets_that_cannot_come_or_go_are_told():
    encoder = attention_encoder([32, 96], spec=SHAPED).capture()
    with pytest.raises(vg.errors.BudgetError, match="is a budget of the encoder already"):
        encoder.add_budget(20)
    with pytest.raises(vg.errors.BudgetError, match="is not a budget of the encoder"):
        encoder.drop_budget(160)
    with pytest.raises(vg.errors.BudgetError, match="no item could use it"):
        encoder.add_budget(0)
    encoder.drop_budget(32)
    with pytest.raises(vg.errors.BudgetError, match="the only budget: add another one first"):
        encoder.drop_budget(96)
    check(encoder, [20])


def test_a_budget_that_is_out_of_use_cannot_come_and_says_why():
    limit = bytes_of(BUDGETS[:3])
    encoder = lazy_encoder(memory=limit, capture=vg.options.Capture(lazy=False)).capture()
    with pytest.raises(vg.errors.BudgetError, match=f"already, but disabled until .* the limit of {limit:,} bytes"):
        encoder.add_budget(LARGEST)


def test_more_items_than_the_arena_has_room_for_are_held_by_a_new_one():
    encoder = attention_encoder([vg.budgets.Budget(256, items=4)], spec=SHAPED, verify=1).capture()
    for _ in range(2):
        check(encoder, [9] * 12)
    encoder.add_budget(vg.budgets.Budget(160, items=16))
    for _ in range(2):
        check(encoder, [9] * 12)
    assert encoder.stats.replays[vg.budgets.Budget(160, items=16)] == 2
    assert encoder.stats.checked[vg.budgets.Budget(256, items=4)] == 3


def test_a_budget_that_came_has_graphs_for_all_static_arguments():
    encoder = attention_encoder(BUDGETS[1:], spec=SHAPED).capture().capture(scale=2.0)
    encoder.add_budget(SMALL)
    assert len(encoder.executor.store) == 8
    for scale in (1.0, 2.0):
        check(encoder, [20], scale=scale)
    assert encoder.stats.replays == {SMALL: 2}


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.filterwarnings("ignore:no graph fits")
def test_budgets_come_and_go_under_load(lazy, limited):
    """With a limit that is released now and then, which one budget may fill."""
    encoder = lazy_encoder(
        capture=vg.options.Capture(lazy=lazy), memory=bytes_of(BUDGETS[:1]) + 1000 if limited else None
    )
    if lazy:
        future = encoder.capture_in_background()

    def work(seed):
        for i in range(24):
            if seed == 0:
                (encoder.drop_budget, encoder.add_budget)[i % 2](BUDGETS[(i // 2) % 4])
                if limited and i % 5 == 4:
                    encoder.release()
                continue
            lengths = [1 + (seed * 7 + i * 5) % 90, 1 + i]
            if i % 3:
                check(encoder, lengths, unseen=i % 2 == 1, scale=1.0 + seed % 2)
            else:
                with encoder.stage(lengths) as stage:
                    stage.rows.copy_(rows_for(lengths))
                assert distance(stage.output, encoder.eager(rows_for(lengths), lengths=lengths)) < 1e-5

    run_in_threads(work)
    assert encoder.budgets == BUDGETS
    if lazy:
        assert not future.done()
        future.cancel()


# A limit of memory

MIB = 1 << 20


@cache
def bytes_of(budgets):
    return attention_encoder(budgets, spec=SHAPED, verify=UNVERIFIED).capture().bytes()


def test_what_an_encoder_holds_is_counted():
    encoder = attention_encoder(BUDGETS, spec=SHAPED)
    assert encoder.bytes() == 0
    held = [bytes_of(BUDGETS[:count]) for count in range(1, 5)]
    assert held == sorted(held)
    encoder.capture()
    assert encoder.bytes() == held[-1]
    encoder.drop_budget(SMALL)
    assert encoder.bytes() < held[-1]
    encoder.release()
    assert encoder.bytes() == 0


def test_without_calls_the_largest_budgets_go():
    limit = bytes_of(BUDGETS[:3])
    encoder = attention_encoder(BUDGETS, spec=SHAPED, memory=limit).capture()
    check(encoder, [20])
    assert captured(encoder) == set(BUDGETS[:3])
    assert len(encoder.executor.store.arena.rows) == BUDGETS[2].rows
    check(encoder, [200])
    assert encoder.stats.eager == {"its budget exceeds the memory limit": 1}
    assert encoder.stats.evicted == {LARGEST: 1}
    assert f"hold more than the limit of {limit:,} bytes" in encoder.report()


def test_budgets_that_calls_do_not_use_go_first():
    encoder = lazy_encoder(memory=bytes_of(BUDGETS) - 1)
    for budget in BUDGETS:
        for _ in range(12 if budget != BUDGETS[1] else 3):
            check(encoder, [budget.rows - 2])
        encoder.capture_pending()
        for _ in range(12 if budget != BUDGETS[1] else 0):
            check(encoder, [budget.rows - 2])
    assert captured(encoder) == set(BUDGETS) - {BUDGETS[1]}
    for _ in range(3):
        check(encoder, [90])
    assert encoder.capture_pending() == []  # others are of more use
    for _ in range(400):
        encoder(rows_for([90]), lengths=[90])
    assert encoder.capture_pending() == [BUDGETS[1]]
    assert captured(encoder) >= {BUDGETS[1], LARGEST}
    assert len(captured(encoder)) < 4
    assert encoder.bytes() < bytes_of(BUDGETS)


@pytest.fixture
def few_are_recent(monkeypatch):
    """Twenty calls in place of a thousand. On a GPU graphs of all sizes take about as much."""
    monkeypatch.setattr(recent, "RECENT", 20)
    monkeypatch.setattr(Tape, "bytes", 1000)
    bytes_of.cache_clear()
    yield
    bytes_of.cache_clear()


def calls_until_captured(encoder, budget):
    """How many calls run without a graph until there is enough use of this budget."""
    for count in range(1, 1000):
        encoder(rows_for([budget.rows - 2]), lengths=[budget.rows - 2])
        if budget in encoder.capture_pending():
            return count
    return 1000


def test_when_traffic_shifts_it_is_followed_however_long_it_was_another(few_are_recent):
    counts = []
    for before in (20, 100, 600):
        encoder = lazy_encoder(budgets=BUDGETS[:3], memory=bytes_of(BUDGETS[:3]) - 1)
        for _ in range(before):
            encoder(rows_for([20]), lengths=[20])
            encoder.capture_pending()
        counts.append(calls_until_captured(encoder, BUDGETS[1]))
        check(encoder, [90])
        assert encoder.stats.replays[BUDGETS[1]] == 1
    assert 10 < min(counts) <= max(counts) <= min(counts) + 2 < 60


def test_what_few_calls_want_is_not_captured_however_long_they_do(few_are_recent):
    encoder = lazy_encoder(budgets=BUDGETS[:3], memory=bytes_of(BUDGETS[:3]) - 1)
    for _ in range(3):
        encoder(rows_for([20]), lengths=[20])
        encoder.capture_pending()
    for at in range(600):
        lengths = [90] if at % 12 == 0 else [20]
        encoder(rows_for(lengths), lengths=lengths)
        assert encoder.capture_pending() == []
    check(encoder, [20])


def test_a_long_life_of_an_earlier_start_does_not_hold_up_the_next_one(few_are_recent, tmp_path):
    path, counts = tmp_path / "warm.json", []
    for before in (20, 10**6):
        first = lazy_encoder(budgets=BUDGETS[:3], capture=vg.options.Capture(lazy=False))
        check(first, [20])
        first.save_warmup(path)
        value = json.loads(path.read_text())
        value["encoders"][0]["used"][0][1][0][-1] = before
        path.write_text(json.dumps(value))
        encoder = lazy_encoder(
            budgets=BUDGETS[:3], memory=bytes_of(BUDGETS[:3]) - 1, capture=vg.options.Capture(lazy=True, warmup=path)
        )
        assert encoder.capture_pending(None) == [SMALL]
        counts.append(calls_until_captured(encoder, BUDGETS[1]))
    assert counts[0] == counts[1] < 60


@pytest.mark.parametrize("lazy", [False, True])
def test_too_little_memory_for_any_graph_is_told_once_and_calls_run_eager(lazy):
    encoder = lazy_encoder(memory=1000, capture=vg.options.Capture(lazy=lazy))
    reason = "its budget exceeds the memory limit"
    if lazy:
        check(encoder, [20])
    with pytest.warns(UserWarning, match="no graph fits the limit of 1,000 bytes, so all calls run eager") as warned:
        encoder.capture_pending() if lazy else check(encoder, [20, 30])
    assert len(warned) == 1
    for unseen in (False, True):
        check(encoder, [20, 30], unseen)
    with encoder.stage([20]) as stage:
        stage.rows.copy_(rows_for([20]))
    assert encoder.stats.eager[reason] >= 3
    assert encoder.bytes() == 0
    encoder.release()
    for _ in range(2):
        check(encoder, [20])
        if lazy:
            encoder.capture_pending()


@pytest.mark.parametrize(
    ("lazy", "unseen", "verify"), [(False, False, 0), (False, True, 1), (True, False, 1), (True, True, 0)]
)
@pytest.mark.filterwarnings("ignore:no graph fits")
def test_first_calls_at_once_run_eager_where_no_graph_fits(lazy, unseen, verify):
    """All are planned before the first of them finds that nothing fits."""
    encoder = lazy_encoder(memory=100, capture=vg.options.Capture(lazy=lazy), verify=verify)
    begin = threading.Barrier(4)

    def work(seed):
        for _ in range(5):
            begin.wait(20)
            check(encoder, [20, 30], unseen, scale=1.0 + seed % 2)
            begin.wait(20)
            encoder.release()

    run_in_threads(work)
    assert not encoder.stats.replays
    assert not encoder.stats.checked


@pytest.mark.parametrize("lazy", [False, True])
def test_no_budget_that_was_given_up_is_proved(lazy):
    encoder = lazy_encoder(memory=bytes_of(BUDGETS[:2]), capture=vg.options.Capture(lazy=lazy))
    verified = encoder.verify([{"x": rows_for([20]), "lengths": [20]}])
    assert verified.budgets == BUDGETS[:2]


def test_where_no_graph_fits_there_is_nothing_to_capture():
    encoder = lazy_encoder(memory=100, capture=vg.options.Capture(lazy=False))
    with pytest.warns(UserWarning, match="no graph fits"):
        encoder.capture()
    encoder.capture(scale=2.0)
    assert encoder.bytes() == 0
    with pytest.raises(vg.errors.InputError, match="no budget holds"):
        encoder.verify([{"x": rows_for([20]), "lengths": [20]}] * 2)


def test_where_the_last_budget_that_fitted_was_dropped_there_is_nothing_to_capture():
    encoder = lazy_encoder(budgets=[32, 256], memory=bytes_of((32,)), capture=vg.options.Capture(lazy=False)).capture()
    encoder.drop_budget(32)
    encoder.capture(scale=2.0)
    check(encoder, [20], scale=2.0)
    assert encoder.stats.eager == {"its budget exceeds the memory limit": 1}


def test_a_budget_that_fits_stays_though_others_were_given_up_after_it():
    """The smaller one is of less use, so it goes first, and the larger one does not fit by itself either."""
    small, large = vg.budgets.Budget(32), vg.budgets.Budget(64)
    encoder = attention_encoder([small, large], spec=SHAPED, memory=bytes_of((small, large)))
    for rows in (20, 20, 20, 20, 20, 50):
        check(encoder, [rows])
    encoder.capture(scale=2.0)
    assert captured(encoder) == {small}
    assert encoder.stats.evicted == {large: 1}
    for scale in (1.0, 2.0):
        check(encoder, [20], scale=scale)
    assert encoder.stats.replays == {small: 7, large: 1}


@settings(max_examples=20)
@given(
    st.integers(0, 2 * bytes_of(BUDGETS)),
    st.booleans(),
    st.lists(st.tuples(LENGTHS, st.booleans(), st.sampled_from([1.0, 2.0])), max_size=8),
)
@pytest.mark.filterwarnings("ignore:no graph fits")
def test_the_limit_holds_after_every_call_and_calls_are_right(limit, lazy, calls):
    encoder = lazy_encoder(memory=limit, capture=vg.options.Capture(lazy=lazy))
    for lengths, unseen, scale in calls:
        check(encoder, lengths, unseen, scale=scale)
        assert encoder.bytes() <= limit
        if lazy:
            encoder.capture_pending()
            assert encoder.bytes() <= limit
    assert encoder.stats.calls == len(calls)


def test_where_the_largest_does_not_fit_the_next_ones_are_tried():
    """Also if it is the only one with a graph."""
    encoder = lazy_encoder(memory=bytes_of(BUDGETS[2:3]) + 1000)
    check(encoder, [250])
    assert encoder.capture_pending() == [LARGEST]
    assert captured(encoder) == {BUDGETS[2]}
    check(encoder, [150])
    assert encoder.stats.replays == {BUDGETS[2]: 1}


@pytest.mark.parametrize("lazy", [False, True])
def test_the_limit_holds_for_budgets_that_come(lazy):
    limit = bytes_of(BUDGETS[:3])
    encoder = (
        lazy_encoder(budgets=BUDGETS[:3], memory=limit, capture=vg.options.Capture(lazy=lazy))
        .capture()
        .capture(scale=2.0)
    )
    before = captured(encoder)
    encoder.add_budget(1024)
    assert encoder.bytes() <= limit
    assert captured(encoder) == before
    assert encoder.stats.evicted[encoder.budgets[-1]] == 1
    check(encoder, [300])
    assert encoder.stats.eager == {"its budget exceeds the memory limit": 1}


def test_the_limit_holds_where_a_capture_for_a_budget_that_comes_fails():
    class Failing(Attention):
        fails = False

        def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
            if self.fails and scale == 2.0:
                raise ValueError("no grid of so many blocks")
            return super().forward(x, cu_seqlens, max_seqlen, scale)

    module, limit = Failing(), 2 * bytes_of(BUDGETS)
    encoder = (
        lazy_encoder(module=module, memory=limit, capture=vg.options.Capture(lazy=False)).capture().capture(scale=2.0)
    )
    module.fails = True
    with pytest.raises(vg.errors.CaptureError, match="no grid of so many blocks"):
        encoder.add_budget(1024)
    assert 0 < encoder.bytes() <= limit
    check(encoder, [20])


def test_a_budget_that_comes_where_none_fitted_takes_its_calls():
    encoder = lazy_encoder(budgets=[256], memory=bytes_of((32,)), capture=vg.options.Capture(lazy=False))
    with pytest.warns(UserWarning, match="no graph fits"):
        check(encoder, [20])
    encoder.add_budget(32)
    check(encoder, [20])
    assert encoder.stats.replays == {encoder.budgets[0]: 1}
    check(encoder, [200])
    assert encoder.stats.eager == {"its budget exceeds the memory limit": 2}


def test_a_limit_is_an_amount_of_memory():
    with pytest.raises(vg.errors.BudgetError, match="'2 apples'"):
        lazy_encoder(memory="2 apples")
    with pytest.raises(vg.errors.BudgetError, match="'2 apples'"):
        vg.Ladder.auto("2 apples")


def test_a_ladder_for_a_memory_is_what_fits_of_the_default_one():
    ladder = vg.Ladder.auto("1.5MiB")
    assert [*ladder] == [*vg.Ladder()]
    spec = vg.BufferSpec(vg.inputs.Rows("input", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(torch.nn.Linear(8, 8), ladder, spec, backend="tape").capture()
    assert MIB < encoder.bytes() <= 1.5 * MIB
    assert 0 < len(captured(encoder)) < len(encoder.budgets) == len([*vg.Ladder()])


# A warm-up file


def measured(encoder):
    encoder.costs = vg.routing.Costs({b: b.rows / 100 for b in encoder.budgets}, 1e-6, 5.0, 1.5, 77.0)
    return encoder


def test_a_second_start_knows_what_the_first_one_measured(tmp_path):
    path = tmp_path / "warm.json"
    first = measured(lazy_encoder(capture=vg.options.Capture(lazy=True, warmup=path)))  # there is no file yet
    for _ in range(2):
        check(first, [20])
        first.capture_pending()
    first.save_warmup(path)
    second = lazy_encoder(capture=vg.options.Capture(lazy=True, warmup=path))
    assert second.costs.as_json() == first.costs.as_json()
    assert second.executor.store.budgets.known == set(BUDGETS)
    assert second.capture_pending(None) == [SMALL]  # which calls used
    check(second, [20])
    assert second.stats.replays == {SMALL: 1}
    assert json.loads(path.read_text())["encoders"][0]["identity"]["torch"] == torch.__version__


def test_a_second_start_wants_what_calls_used_for_their_static_arguments(tmp_path):
    class Scaled(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, scale, shift=0.0):
            return super().forward(x, cu_seqlens, max_seqlen, scale) + (shift if shift != (1,) else 1)

    path = tmp_path / "warm.json"
    first = lazy_encoder(module=Scaled(), capture=vg.options.Capture(lazy=False))
    for _ in range(2):
        check(first, [90], scale=2.0)
    check(first, [20], scale=True, shift=3)
    check(first, [150], scale=1.0, shift=(1,))  # which JSON does not hold
    first.verify([{"x": rows_for([20]), "lengths": [20], "scale": 3.0}])  # is no use
    first.release()
    first.save_warmup(path)
    second = lazy_encoder(module=Scaled(), capture=vg.options.Capture(lazy=True, warmup=path))
    assert second.capture_pending(None) == [BUDGETS[1], SMALL]
    check(second, [90], scale=2.0)
    check(second, [20], scale=True, shift=3)
    assert second.stats.replays == {BUDGETS[1]: 1, SMALL: 1}
    check(second, [90], scale=1.0)
    assert second.stats.eager == {"not captured yet": 1}


def test_what_calls_used_is_forgotten_where_the_module_takes_other_arguments(tmp_path):
    path = tmp_path / "warm.json"
    first = lazy_encoder(capture=vg.options.Capture(lazy=False))
    check(first, [90])
    check(first, [20], scale=2.0)
    first.save_warmup(path)
    path.write_text(path.read_text().replace('"scale"', '"gain"'))
    assert lazy_encoder(capture=vg.options.Capture(lazy=True, warmup=path)).capture_pending(None) == [BUDGETS[1]]


def test_encoders_may_write_one_file_at_once(tmp_path):
    """As the processes of several GPUs do that end together."""
    path, encoder = tmp_path / "warm.json", measured(attention_encoder(BUDGETS, spec=SHAPED))
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(encoder.save_warmup, [path] * 200):
            assert attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path)).costs.measured
    assert [file.name for file in tmp_path.iterdir()] == ["warm.json"]


def test_several_encoders_share_a_file(tmp_path):
    path = tmp_path / "warm.json"

    def encoder(dim, section=None, warmup=None):
        spec = attention_spec(rows=vg.inputs.Rows("x", shape=(dim,)))
        capture = vg.options.Capture(lazy=bool(warmup), warmup=warmup, section=section)
        return attention_encoder(BUDGETS, module=Attention(dim), spec=spec, capture=capture)

    for dim, section, rows in ((8, "questions", 20), (8, "answers", 90), (16, None, 150), (8, "questions", 20)):
        one = encoder(dim, section)
        one(rows_for([rows], dim=dim), lengths=[rows])
        one.save_warmup(path)
    assert len(json.loads(path.read_text())["encoders"]) == 3  # an encoder that is saved again replaces its section
    found = [encoder(*one, path) for one in ((8, "questions"), (8, "answers"), (16, None), (8, None))]
    assert [one.capture_pending(None) for one in found] == [[SMALL], [BUDGETS[1]], [BUDGETS[2]], [BUDGETS[1]]]
    path.write_text(path.read_text().replace(torch.__version__, "1.0"))
    encoder(16).save_warmup(path)
    assert len(json.loads(path.read_text())["encoders"]) == 1  # nobody of this setup reads the others


def test_budgets_that_the_file_does_not_know_are_taken_to_cost_what_lies_between(tmp_path):
    measured(attention_encoder(BUDGETS, spec=SHAPED)).save_warmup(tmp_path / "warm.json")
    other = attention_encoder(
        [32, 256, *BUDGETS[1:3]], spec=SHAPED, capture=vg.options.Capture(warmup=tmp_path / "warm.json")
    )
    assert other.executor.store.budgets.known == set(BUDGETS) & set(other.budgets)
    assert other.costs.measured
    assert set(other.costs.replays) == set(other.budgets)


def test_a_file_of_something_else_is_ignored_and_says_of_what(tmp_path):
    path = tmp_path / "warm.json"
    measured(attention_encoder(BUDGETS, spec=SHAPED)).save_warmup(path)
    for changes, what in (
        ({"module": Held(1)}, "module is .*Attention, not .*Held"),
        ({"module": Attention(16), "spec": attention_spec()}, "weights is .*declaration is"),
        ({"spec": attention_spec()}, "declaration is"),
    ):
        with pytest.warns(UserWarning, match=f"was written for another setup: .*{what}.*It is ignored"):
            encoder = attention_encoder(
                BUDGETS, **({"spec": SHAPED, "capture": vg.options.Capture(warmup=path)} | changes)
            )
        assert not encoder.costs.measured
    (value,) = json.loads(path.read_text())["encoders"]
    del value["identity"]["format"]
    path.write_text(json.dumps(value | {"used": "of another kind"}))
    with pytest.warns(UserWarning, match="for another setup: format is None, not 2. It is ignored, and everything is"):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path))
    with pytest.raises(vg.errors.InputError, match="was written for another setup: format is None, not 2"):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path, on_bad_warmup="error"))
    value["identity"] |= {"format": "2", "device": "NVIDIA H200", "torch": "1.0"}
    path.write_text(json.dumps(value))
    with pytest.warns(UserWarning, match=r"torch is 1.0, not .*; device is NVIDIA H200, not cpu"):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path))


@pytest.fixture(scope="module")
def warm_file(tmp_path_factory):
    """A file with costs, used budgets and timings of attention; its path and its text."""
    path = tmp_path_factory.mktemp("warm") / "warm.json"
    timing.results.clear()
    key = torch.device("cpu"), torch.float32, torch.Size([4, 2, 8]), torch.Size([4, 2, 8]), 4, 4, None, None, "a", "b"
    timing.results[key] = timing.Timed("b", 0.5)
    encoder = measured(attention_encoder(BUDGETS, spec=SHAPED))
    check(encoder, [20])
    encoder.save_warmup(path)
    timing.results.clear()
    (section,) = json.loads(path.read_text())["encoders"]
    return path, json.dumps(section)


@settings(max_examples=30)
@given(st.data())
def test_a_damaged_file_raises_and_touches_nothing(warm_file, data):
    path, text = warm_file
    value, place = json.loads(text), data.draw(st.sampled_from(["costs", "used", "attention", "identity"]))
    if data.draw(st.booleans()):
        path.write_text(text[: data.draw(st.integers(0, len(text) - 3))])
    else:
        value[place] = data.draw(
            st.sampled_from([7, "x", [7], [[7]], [["float32", [4], [4], [1], ["a"], "c", 1]], {"a": 7}])
        )
        path.write_text(json.dumps(value))
        if place == "identity" and isinstance(value[place], dict):
            return
    with pytest.raises(
        vg.errors.InputError, match=r"warm.json is not a warm-up file .*: expected a file from `encoder.save_warmup`"
    ):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path, on_bad_warmup="error"))
    with pytest.warns(UserWarning, match=r"warm.json is not a warm-up file .* It is ignored"):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path))
    assert not timing.results


@pytest.mark.parametrize("number", [-1.0, float("nan"), "x"])
@pytest.mark.parametrize("place", [("costs", "host"), ("costs", "replays", 0, -1), ("used", 0, 1, 0, -1)])
def test_numbers_that_nothing_measures_are_refused(tmp_path, place, number):
    path = tmp_path / "warm.json"
    encoder = measured(attention_encoder(BUDGETS, spec=SHAPED))
    check(encoder, [20])
    encoder.save_warmup(path)
    (inside,) = (value,) = json.loads(path.read_text())["encoders"]
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = number
    path.write_text(json.dumps(value))
    with pytest.raises(vg.errors.InputError, match=rf"warm.json is not a warm-up file .* is {number!r}: expected"):
        attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=path, on_bad_warmup="error"))


def test_attention_takes_what_an_earlier_start_timed(tmp_path):
    key = torch.device("cpu"), torch.float32, torch.Size([4, 2, 8]), torch.Size([4, 2, 8]), 4, 4, None, None, "a", "b"
    timing.results[key] = timing.Timed("b", 0.5)
    attention_encoder(BUDGETS, spec=SHAPED).save_warmup(tmp_path / "warm.json")
    timing.results.clear()
    attention_encoder(BUDGETS, spec=SHAPED, capture=vg.options.Capture(warmup=tmp_path / "warm.json"))
    assert timing.results.pop(key) == ("b", 0.5)


# What only a GPU has: memory that graphs share


class Shared(vg.options.Pool):
    """A pool that holds a MiB for each row of the largest budget with a graph."""

    encoders = ()

    def bytes(self):
        return MIB * max((budget.rows for encoder in self.encoders for budget in captured(encoder)), default=0)


@pytest.mark.parametrize("lazy", [False, True])
def test_where_graphs_share_memory_the_largest_go(lazy, monkeypatch):
    monkeypatch.setattr(Tape, "bytes", 1000)
    pool = Shared()
    encoder = lazy_encoder(memory="200MiB", pool=pool, capture=vg.options.Capture(lazy=lazy))
    pool.encoders = (encoder,)
    for _ in range(2):
        for lengths in ([20], [250], [20]):
            check(encoder, lengths)
            if lazy:
                encoder.capture_pending(None)
            assert encoder.bytes() <= 200 * MIB
    assert max(captured(encoder)) == BUDGETS[2]
    assert SMALL in captured(encoder)
    assert encoder.stats.evicted == {LARGEST: 1}
    assert encoder.stats.eager["its budget exceeds the memory limit"] >= 1


@pytest.mark.filterwarnings("ignore:no graph fits")
def test_of_a_shared_pool_an_encoder_gives_up_its_own_graphs_alone():
    pool = Shared()
    other, limited = (
        lazy_encoder(pool=pool).capture(),
        lazy_encoder(pool=pool, memory="200MiB", capture=vg.options.Capture(lazy=False)),
    )
    pool.encoders = (other, limited)
    for encoder in (limited, other):
        check(encoder, [20])
    assert not captured(limited)
    assert len(captured(other)) == 4
    assert other.stats.replays.total() == 1
