"""`run_under`: what a watched run changes in torch, nothing for other threads, and nothing that outlives it."""

import sys
import threading
from array import array

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import varlen_graphs as vg
from tests.support.encoders import Of
from varlen_graphs.capture.tape import TapeCapture

SPEC = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Compiled:
    """A function under `torch.compile` that counts how often it is compiled and how often compiled code runs."""

    def __init__(self):
        self._counts = array("q", [0, 0])  # which captures do not look into, and so do not undo

        def backend(graph, inputs):
            self._counts[0] += 1

            def run(*args):
                self._counts[1] += 1
                return graph(*args)

            return run

        def double(x):
            return x * 2

        self.function = torch.compile(double, backend=backend, dynamic=True)

    @property
    def compiled(self):
        return self._counts[0]

    @property
    def ran(self):
        return self._counts[1]


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="without a GPU, a CUDA build of torch 2.11 crashes once two threads have compiled",
)
@pytest.mark.parametrize("known", [True, False])
def test_other_threads_run_compiled_code_during_a_capture(known):
    other, x = Compiled(), torch.ones(3)
    if known:
        in_thread(lambda: other.function(x))

    class Tower(nn.Linear):
        def forward(self, x):
            in_thread(lambda: other.function(torch.ones(3)))
            runs.append(other.ran)
            return super().forward(x)

    runs = []
    vg.GraphedEncoder(Tower(8, 8), [64], SPEC, backend="tape").capture()
    assert runs == list(range(other.ran - len(runs) + 1, other.ran + 1))  # each of them ran compiled
    assert other.compiled == 1


@pytest.mark.parametrize("known", [True, False])
def test_captured_code_runs_uncompiled_and_is_compiled_again_afterwards(known):
    inside, x = Compiled(), torch.ones(3)
    if known:
        inside.function(x)
    tape = TapeCapture().capture(lambda: [inside.function(x)], "the test")
    assert (inside.compiled, inside.ran) == (known, known)
    tape.replay()
    assert tape.outputs[0].tolist() == [2.0] * 3
    inside.function(x)
    assert (inside.compiled, inside.ran) == (1, known + 1)


def test_watched_runs_that_overlap_leave_the_compiler_on():
    first_runs, second_runs = threading.Event(), threading.Event()
    ends = []

    def first():
        def run():
            first_runs.set()
            second_runs.wait(10)
            return [torch.ones(3, device="cpu")]

        ends.append(TapeCapture().capture(run, "the first"))

    def second():
        def run():
            second_runs.set()
            thread.join(10)
            return [torch.ones(3, device="cpu")]

        first_runs.wait(10)
        ends.append(TapeCapture().capture(run, "the second"))

    thread = threading.Thread(target=first)
    thread.start()
    second()
    assert len(ends) == 2
    after = Compiled()
    in_thread(lambda: after.function(torch.ones(3)))
    assert (after.compiled, after.ran) == (1, 1)


def several_steps(x):
    with torch.no_grad():
        y = torch.nn.functional.softmax(x, 0)
    for _ in range(2):
        y = y * x
    return [y + 1]


def interrupted(run, at):
    """Run a function, and raise KeyboardInterrupt at the instruction `at` of `several_steps`."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code is not several_steps.__code__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count > at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if a frame asks for them beforehand
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_an_interrupt_at_any_instruction_of_the_captured_code_leaves_the_modes_of_the_caller():
    x, at, grad = torch.ones(3), 0, torch.is_grad_enabled()
    stance = torch._dynamo.eval_frame._stance

    def run():
        TapeCapture().capture(lambda: several_steps(x), "the test")

    with Functions() as functions, Operations() as operations:
        while interrupted(run, at):
            assert torch.is_grad_enabled() == grad, at
            assert not torch.is_inference_mode_enabled(), at
            assert _get_current_function_mode_stack() == [functions], at
            assert _get_current_dispatch_mode_stack() == [operations], at
            assert torch._guards.TracingContext.try_get() is None, at
            assert torch._dynamo.eval_frame._stance == stance, at
            at += 1
    assert at > 30


def swallows(m, x, lengths=None):
    try:
        n = int(x.sum())
    except Exception:
        n = 512
    return x * n


def swallows_and_fails(m, x, lengths=None):
    try:
        n = x.sum().item()
    except Exception as error:
        raise ValueError("no number") from error
    return x * n


@pytest.mark.parametrize("function", [swallows, swallows_and_fails])
def test_a_refusal_that_the_module_swallows_is_raised_at_the_end(function):
    x = torch.ones(4)
    encoder = vg.GraphedEncoder(
        Of(function), [64], vg.BufferSpec(vg.inputs.Rows("x", shape=(4,)), vg.Lengths()), backend="tape"
    )
    with pytest.raises(
        vg.errors.CaptureError, match=r"reads a tensor on the host\n  at .*test_thread_modes.py.*in swallows"
    ):
        encoder.capture()
    with pytest.raises(
        vg.errors.CaptureError, match=r"reads a tensor on the host\n  at .*test_thread_modes.py.*in swallows"
    ):
        TapeCapture().capture(lambda: [function(None, x)], "the test")
