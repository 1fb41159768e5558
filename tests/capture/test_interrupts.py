"""Interrupts at any instruction of a capture, as Ctrl-C and signal handlers that raise bring them."""

import contextlib
import gc
import random
import sys
import threading

import pytest
import torch
import tqdm
from torch.utils import _python_dispatch

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, rows_for

TRIES = 250


class Interrupt:
    """A profiler that raises at the n-th place where Python looks for signals: a call of Python, a return from C."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, arg):
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt

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


def one_encoder():
    spec = attention_spec(rows=vg.PackedRows("x", shape=(8,)))
    return attention_encoder([vg.Budget(64, items=4)], spec=spec)


@pytest.fixture
def process_restored():
    """The lock of tqdm is one of C: an interrupt in its own, which is Python, would leave that held."""
    before = tqdm.tqdm.get_lock()
    tqdm.tqdm.set_lock(threading.RLock())
    yield
    tqdm.tqdm.set_lock(before)
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finaliser
@pytest.mark.usefixtures("process_restored")
@pytest.mark.parametrize("by_call", [False, True], ids=["capture", "first call"])
def test_an_interrupt_at_any_instruction_of_a_capture_leaves_nothing_behind(by_call):
    rows = rows_for([6])

    def work(encoder):
        return encoder(rows, lengths=[6]) if by_call else encoder.capture()

    work(one_encoder())
    counted = Interrupt(-1)
    encoder = one_encoder()
    counted.run(lambda: work(encoder))
    before, left = state_of_torch(), []
    for at in random.Random(0).sample(range(1, counted.seen), TRIES):
        encoder = one_encoder()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupt(at).run(lambda encoder=encoder: work(encoder))
        now = state_of_torch()
        if now != before:
            left.append((at, {name: value for name, value in now.items() if value != before[name]}))
            break  # what follows would tell nothing
        assert not encoder.pool.busy
        torch.testing.assert_close(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6]))
    assert not left
