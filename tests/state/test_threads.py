"""Threads beside captures: none of their writes is lost, none of their calls is wrong or waits for long."""

import contextlib
import itertools
import os
import queue
import threading
import time
import types

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.runs import ran, runs_of
from tests.support.segments import relative

CAPTURES = int(os.environ.get("VARLEN_GRAPHS_CAPTURES", "20"))
"""How many encoders capture while another thread writes; the environment variable names more."""

CODE = """
import functools
import torch
from torch import nn

NUMBER, LISTED, TABLE, SEEN = 0, [], {}, 0


def in_a_closure():
    number = 0

    def read():
        return number

    def write():
        nonlocal number
        number += 1

    return read, write


read, write = in_a_closure()


@functools.lru_cache(maxsize=None)
def cached(number):
    return [number]


def function(x, default=[]):
    return NUMBER, LISTED, TABLE, cached, read(), default, function


class Module(nn.Module):
    shared, number_of_class = {}, 0

    def __init__(self):
        super().__init__()
        self.lin, self.number, self.listed, self.table, self.calls = nn.Linear(8, 8), 0, [], {}, 0
        self.register_buffer("steps", torch.zeros(()))
        self.eval()

    def forward(self, x):
        global SEEN
        SEEN = len(x)
        self.calls += 1
        function(x), self.number, self.listed, self.table, self.shared, self.number_of_class
        return self.lin(x)
"""


def spec():
    return vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())


def encoder_of(module, budgets=(64, 256), **options):
    return vg.GraphedEncoder(module, list(budgets), spec(), backend="tape", **options)


class Writer(threading.Thread):
    """Writes what the code of a module reads, and looks whether it is still there the next time.

    Attributes:
        lost: The names of what was not as it had been written.
        rounds: How often it wrote all of it.
    """

    def __init__(self, code, module):
        super().__init__(daemon=True)
        self.code, self.module, self.lost, self.rounds = code, module, set(), 0
        self.ends = threading.Event()

    def run(self):
        torch.set_grad_enabled(False)
        code, module = self.code, self.module
        while not self.ends.is_set():
            self.look(self.rounds)
            self.rounds += 1
            number = self.rounds
            code.NUMBER = module.number = code.Module.number_of_class = code.function.number = number
            code.write()
            for listed in (code.LISTED, module.listed, code.function.__defaults__[0]):
                listed.append(number)
                del listed[:-20]
            for table in (code.TABLE, module.table, code.Module.shared):
                table[number] = number
                table.pop(number - 20, None)
            code.cached(number)
            module.steps += 1
            if number % 50 == 0:
                time.sleep(0)

    def look(self, number):
        code, module = self.code, self.module
        if not number:
            return
        found = {
            "a global": code.NUMBER,
            "an attribute": module.number,
            "a class attribute": code.Module.number_of_class,
            "a function's attribute": code.function.number,
            "a closure": code.read(),
            "a buffer": int(module.steps),
            "a cache": code.cached.cache_info().currsize,
        }
        containers = {
            "a global list": code.LISTED,
            "a list": module.listed,
            "a default": code.function.__defaults__[0],
            "a global dict": list(code.TABLE),
            "a dict": list(module.table),
            "a dict of the class": list(code.Module.shared),
        }
        expected = list(range(max(1, number - 19), number + 1))
        self.lost |= {name for name, value in found.items() if value != number}
        self.lost |= {name for name, value in containers.items() if value != expected}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_captures_lose_no_writes_of_another_thread():
    code = types.ModuleType("written")
    exec(CODE, vars(code))
    module = code.Module()
    writer = Writer(code, module)
    writer.start()
    try:
        end, captured = time.monotonic() + (3 if CAPTURES <= 20 else float("inf")), 0
        while captured < CAPTURES and time.monotonic() < end:
            encoder = encoder_of(module, [64])
            rows = rows_for([5])
            with contextlib.suppress(vg.errors.VarlenGraphsError):  # what a module writes in each run may be refused
                got = encoder.capture()(rows, lengths=[5]) if captured % 2 else encoder(rows, lengths=[5])
                assert relative(got, module.lin(rows)) < 1e-5
            captured += 1
    finally:
        writer.ends.set()
        writer.join()
    assert captured >= 5
    assert writer.rounds > 100
    writer.look(writer.rounds)
    assert not writer.lost


class Held(nn.Module):
    """A module whose runs in one thread wait to be let go, after a few that do not.

    What they wait for is made of locks, which nobody can copy or undo.
    """

    def __init__(self, free_runs=0):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.thread = nn.Linear(8, 8), None
        self.tokens, self.entered, self.go = queue.SimpleQueue(), threading.Lock(), threading.Lock()
        for token in range(free_runs):
            self.tokens.put(token)
        self.entered.acquire(), self.go.acquire()
        self.eval()

    def forward(self, x):
        if threading.get_ident() == self.thread:
            try:
                self.tokens.get_nowait()
            except queue.Empty:
                if self.entered.locked():
                    self.entered.release()
                self.go.acquire(timeout=10)
                self.let_go()
        return self.lin(x)

    def let_go(self):
        if self.go.locked():
            self.go.release()


@pytest.mark.parametrize("free_runs", [0, 1, 2, 4, 6, 8])
def test_a_first_call_does_not_wait_for_another_encoder_that_captures(free_runs):
    """The module of the other encoder stands still, in the first of its runs or in a later one."""
    module, other, rows = Held(free_runs), Held(), rows_for([5])
    encoder, outputs = encoder_of(module), {}

    @torch.no_grad()
    def capture():
        module.thread = threading.get_ident()
        outputs["captured"] = encoder(rows, lengths=[5])

    @torch.no_grad()
    def call():
        outputs["called"] = encoder_of(other)(rows, lengths=[5])

    threads = [threading.Thread(target=work, daemon=True) for work in (capture, call)]
    threads[0].start()
    assert module.entered.acquire(timeout=20)
    threads[1].start()
    threads[1].join(4)
    waits = not outputs
    module.let_go()
    for thread in threads:
        thread.join(20)
    assert not waits
    for got in (outputs["captured"], outputs["called"], encoder(rows, lengths=[5])):
        assert relative(got, module.lin(rows)) < 1e-5


class Counting(nn.Module):
    """Its runs are counted by `runs_of`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.eval()

    def forward(self, x):
        ran(self, x)
        return self.lin(x)


def in_threads(*works):
    """Run functions in threads of their own that begin at once, and raise what one of them raised."""
    failed, barrier = [], threading.Barrier(len(works))

    @torch.no_grad()
    def run(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_encoders_of_one_module_capture_in_two_threads():
    for ahead in (False, True):
        module = Counting()
        encoders = [encoder_of(module), encoder_of(module)]

        def work(encoder, ahead=ahead, module=module):
            if ahead:
                encoder.capture()
            for lengths in ([5], [150], [3, 4], [40, 30]) * 3:
                rows = rows_for(lengths)
                assert relative(encoder(rows, lengths=lengths), module.lin(rows)) < 1e-5

        in_threads(*(lambda one=one: work(one) for one in encoders))
        assert all(encoder.stats.calls == 12 for encoder in encoders)
        rows = runs_of(module)
        assert len(rows) <= 2 * 2 + sum(one.stats.eager.total() for one in encoders)  # once a graph of each encoder
        assert set(rows) <= {5, 150, 7, 70}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_first_calls_of_one_encoder_in_several_threads_are_each_run_at_most_once():
    module = Counting()
    encoder = encoder_of(module)

    def work(number):
        for lengths in ([number + 2], [20 * number + 1], [3, number + 1]):
            rows = rows_for(lengths, number)
            assert relative(encoder(rows, lengths=lengths), module.lin(rows)) < 1e-5

    in_threads(*(lambda number=number: work(number) for number in range(4)))
    assert encoder.stats.calls == 12
    rows = runs_of(module)
    assert 1 <= len(rows) <= 4 + encoder.stats.eager.total()
    assert max(rows) <= 61


def test_calls_while_other_threads_capture_and_release():
    module = Counting()
    encoder = encoder_of(module)
    end = time.monotonic() + 1.0

    def calls():
        for number in itertools.count():
            lengths = [1 + number % 60, 3]
            rows = rows_for(lengths)
            assert relative(encoder(rows, lengths=lengths), module.lin(rows)) < 1e-5
            if time.monotonic() > end:
                return

    def operate():
        while time.monotonic() < end:
            encoder.release()
            encoder.capture()
            encoder.check()
            encoder.report()

    in_threads(calls, calls, operate)


def test_weights_that_a_thread_updates_during_a_capture_are_followed():
    module, rows = Counting(), rows_for([5])
    encoder = encoder_of(module)
    ends = threading.Event()

    def update():
        while not ends.is_set():
            module.lin.weight.mul_(0.999)
            time.sleep(0.0005)

    def capture():
        try:
            encoder.capture()
        finally:
            ends.set()

    in_threads(update, capture)
    for factor in (1.0, -2.0):
        module.lin.weight.mul_(factor)
        assert relative(encoder(rows, lengths=[5]), module.lin(rows)) < 1e-5


# Interrupts and errors in the module


ERRORS = queue.SimpleQueue()
"""What the next runs raise, if anything."""


class Raising(Counting):
    """Raises in its runs of some numbers.

    An error of the caller's own run is the caller's; one of a later run is a reason not to capture it, unless it ends
    the program.
    """

    def forward(self, x):
        y = super().forward(x)
        with contextlib.suppress(queue.Empty):
            if error := ERRORS.get_nowait():
                raise error("in the module")
        return y


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("error", "at"),
    [
        *itertools.product([KeyboardInterrupt, RuntimeError], range(1, 7)),
        *itertools.product([SystemExit, GeneratorExit], [1, 2, 5]),
    ],
)
def test_an_error_in_a_run_of_the_module_leaves_an_encoder_that_works(error, at):
    module = Raising()
    for one in [None] * (at - 1) + [error]:
        ERRORS.put(one)
    encoder, rows = encoder_of(module), rows_for([5])
    with contextlib.suppress(error, vg.errors.VarlenGraphsError if at > 1 and error is RuntimeError else error):
        encoder(rows, lengths=[5])
    assert len(runs_of(module)) == 1
    while not ERRORS.empty():
        ERRORS.get()
    for lengths in ([5], [150], [3, 4]):
        rows = rows_for(lengths)
        assert relative(encoder(rows, lengths=lengths), module.lin(rows)) < 1e-5
    assert encoder.pool is not None
    assert relative(encoder_of(Counting())(rows, lengths=lengths), Counting().lin(rows)) < 1e-5


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("warm", [False, True], ids=["before any capture", "after captures"])
def test_a_thread_forks_and_the_child_makes_encoders_of_its_own(warm):
    module, rows = Counting(), rows_for([5])
    encoder = encoder_of(module)
    expected = module.lin(rows)
    if warm:
        encoder(rows, lengths=[5])
    ended = []

    def fork():
        child = os.fork()
        if not child:
            code = 1
            try:
                torch.set_num_threads(1)
                own = encoder_of(module)
                right = relative(own(rows, lengths=[5]), expected) < 1e-5 and own.stats.replays.total() == 1
                if warm:
                    try:
                        encoder(rows, lengths=[5])
                        right = False
                    except vg.errors.StaleGraphError:
                        pass  # it is the parent's
                else:
                    right = right and relative(encoder(rows, lengths=[5]), expected) < 1e-5
                code = 0 if right else 2
            finally:
                os._exit(code)
        for _ in range(2000):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return ended.append(os.waitstatus_to_exitcode(status))
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        return ended.append("hangs")

    in_threads(fork)
    assert ended == [0]
    assert relative(encoder(rows, lengths=[5]), expected) < 1e-5
