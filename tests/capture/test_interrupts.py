"""Interrupts of captures and calls, as Ctrl-C and signal handlers that raise bring them."""

import contextlib
import gc
import inspect
import random
import sys
import threading

import pytest
import torch
from torch.utils import _python_dispatch

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, rows_for

TRIES = 15


class Interrupt:
    """A profiler that raises at the n-th place where Python looks for signals: a call of Python, a return from C.

    With a function, only while that runs, and not while a context manager is entered or left.
    """

    def __init__(self, at, inside=None):
        self.at, self.inside, self.seen, self.depth = at, inside, 0, 0

    def __call__(self, frame, event, arg):
        if self.inside is not None and frame.f_code is self.inside.__code__:
            self.depth += (event == "call") - (event == "return")
        if event in ("call", "c_return") and (self.inside is None or (self.depth and self.counts(frame))):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt

    def counts(self, frame):
        while frame is not None and frame.f_code is not self.inside.__code__:
            if frame.f_code.co_name in ("__enter__", "__exit__") or frame.f_code.co_flags & inspect.CO_GENERATOR:
                return False
            frame = frame.f_back
        return frame is not None

    def run(self, work):
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)


def state_of_torch():
    """Return what an interrupt might leave changed, in this thread and in the process."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "in a dispatch mode": _python_dispatch.is_in_torch_dispatch_mode(),
        "collector": gc.isenabled(),
    }


def is_free(pool):
    """Return True if another thread can take the turn of a pool."""
    got = []

    def take():
        got.append(pool.lock.acquire(blocking=False))
        if got[0]:
            pool.lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def one_encoder():
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
    return attention_encoder([vg.budgets.Budget(64, items=4)], spec=spec)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finaliser
@pytest.mark.parametrize("by_call", [False, True], ids=["capture", "first call"])
def test_an_interrupt_anywhere_in_the_module_during_a_capture_leaves_nothing_behind(by_call):
    """Also in the proof of the new graph."""
    rows = rows_for([6])

    def work(encoder):
        return encoder(rows, lengths=[6]) if by_call else encoder.capture()

    work(one_encoder())
    counted = Interrupt(-1, Attention.forward)
    encoder = one_encoder()
    counted.run(lambda: work(encoder))
    before, left = state_of_torch(), []
    for at in random.Random(0).sample(range(1, counted.seen), TRIES):
        encoder = one_encoder()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupt(at, Attention.forward).run(lambda encoder=encoder: work(encoder))
        now = state_of_torch()
        if now != before:
            left.append((at, {name: value for name, value in now.items() if value != before[name]}))
            break  # what follows would tell nothing
        assert not encoder.pool.busy
        assert is_free(encoder.pool), at
        torch.testing.assert_close(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6]))
    assert not left


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_instruction_of_a_warm_call_leaves_the_pool_free():
    encoder, rows = one_encoder(), rows_for([6])
    expected = encoder(rows, lengths=[6])
    counted = Interrupt(-1)
    counted.run(lambda: encoder(rows, lengths=[6]))
    before = state_of_torch()
    for at in range(1, counted.seen):
        with contextlib.suppress(KeyboardInterrupt):
            Interrupt(at).run(lambda: encoder(rows, lengths=[6]))
        assert is_free(encoder.pool), at
        assert state_of_torch() == before, at
        torch.testing.assert_close(encoder(rows, lengths=[6]), expected)


class Stream:
    """A stream that remembers what it waits for, by streams and the number of operations queued there by then."""

    def __init__(self):
        self.queued, self.waits = 0, {}

    def wait_stream(self, other):
        self.waits[other] = max(other.queued, self.waits.get(other, 0))
        for far, count in other.waits.items():
            self.waits[far] = max(count, self.waits.get(far, 0))

    def wait_event(self, event):
        for far, count in event.after.items():
            self.waits[far] = max(count, self.waits.get(far, 0))


class Event:
    def __init__(self):
        self.after = {}

    def query(self):
        return False

    def record(self, stream):
        self.after = {**stream.waits, stream: stream.queued}


def test_an_interrupt_at_any_instruction_of_a_block_leaves_the_lock_free_and_the_order_of_streams_kept(monkeypatch):
    streams = threading.local()
    monkeypatch.setattr("varlen_graphs.capture.stream_order.current_stream", lambda device: streams.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def block(pool, stream, inner=None):
        streams.now = stream
        with pool.exclusive(), pool.order:
            stream.queued += 1
            if inner is not None:
                block(pool, inner)
                streams.now = stream
            stream.queued += 1

    def new_pool():
        pool = vg.options.Pool()
        pool.order.device = torch.device("cuda", 0)
        block(pool, Stream())
        return pool

    for several in (False, True):
        first, second = Stream(), Stream()
        counted = Interrupt(-1)
        pool = new_pool()
        counted.run(lambda pool=pool, first=first, second=second: block(pool, first, second))
        for at in range(1, counted.seen + 1):
            pool, first = new_pool(), Stream()
            second = Stream() if several else first
            with contextlib.suppress(KeyboardInterrupt):
                Interrupt(at).run(lambda pool=pool, first=first, second=second: block(pool, first, second))
            assert is_free(pool), at
            for _ in range(2):
                other = Stream()
                thread = threading.Thread(target=block, args=(pool, other))
                thread.start()
                thread.join()
                assert all(other.waits.get(one, 0) == one.queued for one in (first, second)), at
