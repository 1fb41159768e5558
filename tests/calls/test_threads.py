"""`Pool` among threads and processes: calls of every kind at once, forks, and the end of the interpreter."""

import os

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, rows_for
from tests.support.forked_scripts import run_script
from tests.support.threads import run_in_threads
from tests.support.towers import distance

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


def test_calls_of_every_kind_of_several_encoders_under_load():
    """Two encoders share a pool and one has its own; one thread releases, captures and poisons all the while."""
    pool = vg.options.Pool()
    encoders = [attention_encoder(spec=SHAPED, pool=pool) for _ in range(2)] + [attention_encoder(spec=SHAPED)]
    module = encoders[0].module
    wrong, calls = [], []

    def work(seed):
        for i in range(24):
            encoder = encoders[(seed + i) % 3]
            if seed == 0:
                (encoder.release, encoder.capture, encoder.poison, encoder.check)[i % 4]()
                continue
            lengths, scale = [1 + (seed * 7 + i * 3) % 60, 1 + i], 1.0 + (i % 2)
            rows = rows_for(lengths, seed)
            kind = (seed + i // 3) % 3
            if kind == 0:
                got = encoder(rows, lengths=lengths, scale=scale)
            elif kind == 1:
                got = encoder(rows, lengths=torch.tensor(lengths), scale=scale)
            else:
                with encoder.stage(lengths, scale=scale) as stage:
                    stage.rows.copy_(rows)
                got = stage.output
            cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
            with torch.no_grad():
                expected = module(rows, cu_seqlens, max(lengths), scale)
            calls.append(kind)
            if distance(got, expected) > 1e-5:
                wrong.append((seed, i, kind))

    run_in_threads(work, count=5)
    for encoder in encoders:
        encoder.check()
    assert not wrong
    assert len(calls) == 4 * 24
    assert set(calls) == {0, 1, 2}


class Outer(nn.Module):
    """Calls an encoder of its own part."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(8, 8)

    def forward(self, x, lengths):
        return self.inner(self.linear(x), lengths=lengths)


NESTED = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "two pools"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "inner captures"])
def test_an_encoder_inside_of_a_captured_module_is_refused_by_name(shared, lazy):
    """Its graphs would be replayed without its lock, or one thread would wait for the other one's pool forever."""
    inner = attention_encoder(spec=SHAPED, capture=vg.options.Capture(lazy=lazy))
    outer = vg.GraphedEncoder(Outer(inner).eval(), [64], NESTED, backend="tape", pool=inner.pool if shared else None)
    rows = rows_for([5, 6])
    refused = "encoder of Attention was called inside of Outer, which another encoder is capturing: graphs do not nest"
    inner(rows, lengths=[5, 6])  # while one thread captures, calls of others run eager, and nothing is refused

    def work(number):
        for _ in range(5):
            if number % 2:
                assert distance(inner(rows, lengths=[5, 6]), inner.eager(rows, lengths=[5, 6])) < 1e-5
            else:
                with pytest.raises(vg.errors.CaptureError, match=refused):
                    outer(rows, lengths=[5, 6])

    run_in_threads(work)
    with pytest.raises(vg.errors.CaptureError, match=refused):
        outer.capture()
    assert not [*outer.executor.store.sets]


def test_an_encoder_inside_of_a_module_that_runs_eager_replays_its_graphs():
    inner = attention_encoder(spec=SHAPED)
    outer = vg.GraphedEncoder(Outer(inner).eval(), [64], NESTED, backend="eager")
    rows = rows_for([5, 6])

    def work(number):
        for _ in range(5):
            assert distance(outer(rows, lengths=[5, 6]), inner.eager(outer.module.linear(rows), lengths=[5, 6])) < 1e-5

    run_in_threads(work)
    assert inner.stats.replays.total() == 20


def test_weights_that_move_under_load_are_captured_anew():
    encoder = attention_encoder(spec=SHAPED, capture=vg.options.Capture(on_change="recapture")).capture()
    wrong = []

    def work(seed):
        for i in range(15):
            lengths = [1 + (seed * 7 + i * 3) % 60]
            rows = rows_for(lengths, seed)
            if seed == 0:
                with encoder.pool.exclusive():  # nobody reads what is exchanged
                    encoder.module.qkv.weight.data = encoder.module.qkv.weight.data.clone()
            if distance(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)) > 1e-5:
                wrong.append((seed, i))

    run_in_threads(work)
    encoder.check()
    assert not wrong


FORK = """
    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException as error:
                print(type(error).__name__, flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_is_told_that_graphs_do_not_survive():
    printed, _ = run_script(
        FORK,
        """
    encoder = attention_encoder(spec=spec)
    unused = attention_encoder(spec=spec)
    expected = encoder(rows, lengths=[6])

    def work():
        for use in (
            lambda: encoder(rows, lengths=[6]), lambda: encoder(rows, lengths=torch.tensor([6])), encoder.release,
            encoder.capture, encoder.check, encoder.poison, lambda: encoder.stage([6]).__enter__(),
        ):
            try:
                use()
            except vg.errors.StaleGraphError as error:
                assert "start workers with multiprocessing's 'spawn', or create the encoder in the" in str(error), error
            else:
                raise AssertionError("went unnoticed")
        torch.testing.assert_close(encoder.eager(rows, lengths=[6]), expected)  # needs no graphs
        for own in (unused, attention_encoder(spec=spec)):
            torch.testing.assert_close(own(rows, lengths=[6]), expected)
        print("told")

    assert in_child(work) == 0
    assert in_child(lambda: globals().pop("encoder")) == 0  # what is freed in a child asks the GPU for nothing
    assert torch.equal(encoder(rows, lengths=[6]), expected)
    """,
    )
    assert printed == ["told"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_other_threads_replay_and_capture_does_not_hang():
    printed, _ = run_script(
        FORK,
        """
    slow = attention_encoder(spec=spec, module=Slow())
    threading.Thread(target=slow.capture, daemon=True).start()
    Slow.capturing.wait()

    def work():
        try:
            slow(rows, lengths=[6])  # its lock is held, by a thread that is not here
        except vg.errors.StaleGraphError:
            print("told")
        attention_encoder(spec=spec)(rows, lengths=[6])  # so was the turn to capture
        print("captured")

    assert in_child(work) == 0
    slow(rows, lengths=[6])
    print("whole")
    """,
    )
    assert printed == ["told", "captured", "whole"]


def test_the_interpreter_ends_quietly_whatever_is_left():
    printed, errors = run_script("""
    encoder = attention_encoder(spec=spec, pool=vg.options.Pool())
    encoder.self = encoder  # for the last collection
    stage = encoder.stage([6])
    writing = stage.__enter__()  # a block that nobody leaves

    import atexit
    other = attention_encoder()
    atexit.register(lambda: print(len(other(rows, lengths=[6])), flush=True))
    """)
    assert printed == ["6"]
    assert "Exception" not in errors
    assert "Error" not in errors


def test_the_interpreter_ends_while_threads_replay_and_capture():
    """It must not hang. How the process ends is torch's: in 100 of 100 runs, such threads with `torch.mm` alone abort it.

    Python unwinds the stacks of daemon threads, and takes apart under them what they use.
    """
    script = """
    encoder = attention_encoder(spec=spec).capture()

    def replay():
        while True:
            encoder(rows, lengths=[6])

    for work in (replay, replay, attention_encoder(spec=spec, module=Slow()).capture):
        threading.Thread(target=work, daemon=True).start()
    Slow.capturing.wait()
    print("ready", flush=True)
    """
    printed, _ = run_script(script, ends=None)
    assert printed == ["ready"]
