"""Captures that fail, memory that goes, threads and processes, on real CUDA graphs."""

import gc
import logging
import queue
import threading
from functools import partial

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_spec
from tests.support.gpu import on_gpus, rows_on_gpu
from tests.support.scripts import run_script
from tests.support.threads import run_in_threads
from tests.support.towers import equal_bits

pytestmark = on_gpus()

SIZES = (256, 1024, 2048)
SPEC = attention_spec(rows=vg.inputs.Rows("x", shape=(16,)))
GIB = 1 << 30


def capturing():
    return torch.cuda.is_current_stream_capturing()


class Faulty(Attention):
    """Does something at certain numbers of rows."""

    def __init__(self, fault, sizes):
        super().__init__(16)
        self.fault, self.sizes = fault, sizes

    def forward(self, x, cu_seqlens, max_seqlen):
        out = super().forward(x, cu_seqlens, max_seqlen)
        if len(x) in self.sizes:
            self.fault(out)
        return out * 1.0


def faulty(fault, sizes, **options):
    budgets = [vg.budgets.Budget(rows, items=8) for rows in SIZES]
    return vg.GraphedEncoder(Faulty(fault, sizes).to("cuda"), budgets, SPEC, **options)


def check_outputs(encoder, largest=SIZES[-1]):
    for lengths in ([20], [900], [100, 300], [largest]):
        rows = rows_on_gpu(lengths)
        torch.testing.assert_close(
            encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths), rtol=1e-4, atol=1e-4
        )


def check_working(encoder, largest=SIZES[-1]):
    check_outputs(encoder, largest)
    assert torch.randn(4, device="cuda").isfinite().all()


def test_a_budget_that_memory_is_too_short_for_is_out_of_use():
    """The warm-up of 65,536 rows needs 16 GiB, of which there are four."""

    class Hungry(nn.Module):
        def forward(self, x):
            return x + x.new_zeros(len(x), len(x)).sum(1, keepdim=True)

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * GIB) / total)
    try:
        spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(16,)), vg.Lengths())
        module = Hungry()
        module.register_buffer("place", torch.zeros(1, device="cuda"))
        encoder = vg.GraphedEncoder(module, [1024, 4096, 65_536], spec)
        with pytest.warns(
            UserWarning, match="the graph of 65536 rows could not be captured, and the budget is disabled.*memory"
        ):
            encoder.capture()
        assert torch.cuda.memory_allocated() - before < GIB
        assert "disabled: OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB" in encoder.report()
        for count in (5, 3000, 5000):
            rows = rows_on_gpu([count])
            assert torch.equal(encoder(rows, lengths=[count]), rows)
        assert encoder.stats.eager["its budget could not be captured"] == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    encoder.release()
    encoder.capture()
    assert "disabled: " not in encoder.report()


TRIES, DRAWN, ERRORS = [], [], []
"""What faults write down; no module keeps it, so captures do not copy it."""


def test_memory_that_runs_out_inside_a_capture_is_given_back():
    def fault(x):
        if capturing():
            TRIES.append(len(x))
            x.new_empty(1 << 42)

    for sizes in ((2048,), (1024,), (1024, 2048)):
        TRIES.clear()
        encoder = faulty(fault, sizes)
        with pytest.warns(UserWarning, match="could not be captured, and the budget is disabled"):
            encoder.capture()
        assert [size for size in (2048, 1024) if size in sizes for _ in range(2)] == TRIES  # with what was freed
        check_working(encoder, max(set(SIZES) - {*sizes}))
        encoder.release()


def test_failing_again_and_again_takes_no_memory():
    def fault(x):
        if capturing():
            x.new_empty(1 << 42)

    encoder, reserved = faulty(fault, SIZES), []
    for _ in range(10):
        with pytest.raises(vg.errors.CaptureError, match="no budget could be captured, because memory is short"):
            encoder.capture()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[6:]) <= reserved[5] + (64 << 20), reserved  # by then scratch is kept for all of torch's streams
    encoder.module.sizes = ()
    check_working(encoder)


def test_a_capture_that_another_thread_invalidates_is_tried_again():
    failed = []
    TRIES.clear()

    def synchronize():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            failed.append(error)

    def fault(x):
        if capturing():
            TRIES.append(len(x))
            if len(TRIES) == 1:
                thread = threading.Thread(target=synchronize)
                thread.start()
                thread.join()

    encoder = faulty(fault, (1024,)).capture()
    assert len(TRIES) in (1, 2)  # with what another thread invalidated
    check_working(encoder)
    assert "disabled: " not in encoder.report()


def test_what_cuda_refuses_at_one_size_leaves_the_others():
    def fault(x):
        if capturing():
            torch.cuda.current_stream().synchronize()

    encoder = faulty(fault, (2048,))
    with pytest.warns(UserWarning, match="the graph of 2048 rows could not be captured.*not permitted"):
        encoder.capture()
    assert "in fault: torch.cuda.current_stream().synchronize()" in encoder.report()
    check_working(encoder, 1024)


@pytest.mark.parametrize("inside", [False, True], ids=["warm-up", "capture"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_encoder_and_process_able_to_capture(inside, interrupt):
    def fault(x):
        if capturing() == inside:
            raise interrupt

    encoder = faulty(fault, (1024,) if inside else (2048,))  # only the largest runs ahead of its capture
    for _ in range(2):
        with pytest.raises(interrupt):
            encoder.capture()
        assert not capturing()
        assert gc.isenabled()
    other = faulty(None, (), pool=encoder.pool)
    check_working(other)
    encoder.module.sizes = ()
    check_working(encoder)
    check_working(other)


def test_moved_weights_are_captured_anew_in_the_same_call(caplog):
    encoder = faulty(None, (), capture=vg.options.Capture(on_change="recapture")).capture()
    rows = rows_on_gpu([100, 300])
    for change in (lambda m: m.half(), lambda m: m.float(), lambda m: setattr(m.qkv.weight, "data", m.qkv.weight * 2)):
        with torch.no_grad(), caplog.at_level(logging.WARNING, "varlen_graphs"):
            change(encoder.module)
            got, expected = encoder(rows, lengths=[100, 300]), encoder.eager(rows, lengths=[100, 300])
        assert got.dtype == expected.dtype == encoder.module.qkv.weight.dtype
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert sum("recaptured" in record.getMessage() for record in caplog.records) == 3


def test_freed_memory_is_never_replayed():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * self.factor

    module = Scaled()
    module.factor = torch.full((16,), 3.0, device="cuda")
    encoder = vg.GraphedEncoder(module, [256], vg.BufferSpec(vg.inputs.Rows("x", shape=(16,)), vg.Lengths()))
    rows = rows_on_gpu([6])
    assert torch.equal(encoder(rows, lengths=[6]), rows * 3)
    module.factor.untyped_storage().resize_(0)
    with pytest.raises(vg.errors.StaleGraphError, match="'factor' was freed since the graphs were captured"):
        encoder(rows, lengths=[6])


def test_state_that_the_run_before_a_capture_left_behind_is_held():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("start", torch.ones(1 << 20))
            self.state = None

        def forward(self, x):
            state = self.start if self.state is None else self.state
            self.state = state + 1
            return x + state[:1]

    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Stateful().to("cuda"), [64], spec, verify=vg.options.Verify(at_capture=False))
    rows = rows_on_gpu([6])
    expected = encoder(rows, lengths=[6])
    others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]  # would take what is free
    assert torch.equal(encoder(rows, lengths=[6]), expected)
    assert expected.isfinite().all()
    del others


def test_an_upload_of_pinned_memory_is_held_and_one_of_memory_made_in_the_forward_refused():
    class Uploading(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.make = make

        def forward(self, x):
            return x * self.scale + self.make().to(x.device, non_blocking=True)

    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    pinned = torch.full((16,), 3.0).pin_memory()
    encoder = vg.GraphedEncoder(Uploading(lambda: pinned).to("cuda"), [64], spec)
    rows = rows_on_gpu([6])
    torch.testing.assert_close(encoder(rows, lengths=[6]), rows + 3)
    pinned.fill_(4.0)
    torch.testing.assert_close(encoder(rows, lengths=[6]), rows + 4)
    constant = Uploading(lambda: torch.tensor([3.0] * 16, pin_memory=True)).to("cuda")
    torch.testing.assert_close(vg.GraphedEncoder(constant, [64], spec)(rows, lengths=[6]), rows + 3)
    made = vg.GraphedEncoder(Uploading(lambda: (pinned * 2).pin_memory()).to("cuda"), [64], spec)
    with pytest.raises(vg.errors.CaptureError, match="uploads host memory that the run itself created"):
        made(rows, lengths=[6])


def test_what_is_kept_outside_of_the_module_is_told():
    class Keeping(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            out = super().forward(x, cu_seqlens, max_seqlen)
            self.qkv.seen = out[:3]
            listed.append(out * 2)
            hidden.put(out.double())
            return out * 1.0

    listed, hidden = [], queue.SimpleQueue()  # into which nothing looks
    encoder = vg.GraphedEncoder(Keeping(16).to("cuda"), [256], SPEC)
    with pytest.raises(vg.errors.CaptureError, match="keeps something where no copy of it reaches"):
        encoder.capture()  # of rows that no call brought
    encoder.release()
    with pytest.warns(UserWarning, match="something outside of the module keeps 2 tensors made while graphs were"):
        encoder(rows_on_gpu([100]), lengths=[100])
    for dtype in ("float32", "float64"):
        assert f"kept in the memory of graphs, which replays overwrite: {dtype} [256, 16]" in encoder.report()
    plain = faulty(None, ()).capture()  # the outputs and what cuBLAS keeps are not counted
    assert "kept in" not in plain.report()


def test_encoders_are_captured_while_others_replay_and_memory_is_pinned():
    steady = faulty(None, ()).capture()
    rows = rows_on_gpu([100, 300])
    expected = steady(rows, lengths=[100, 300])
    torch.cuda.synchronize()
    wrong, errors, stop = [], [], threading.Event()

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                if number < 2:
                    for _ in range(5):
                        check_outputs(faulty(None, ()).capture())
                    return
                while not stop.is_set():
                    if number == 2:
                        torch.randn(1000).pin_memory().to("cuda", non_blocking=True)
                    elif not equal_bits(steady(rows, lengths=[100, 300]), expected):
                        wrong.append(number)
                    torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)
        finally:
            if number < 2:
                finished.append(number)
                if len(finished) == 2:
                    stop.set()

    finished = []
    run_in_threads(work, count=5)
    assert not errors
    assert not wrong
    assert torch.randn(4, device="cuda").isfinite().all()


def test_other_threads_draw_random_numbers_while_a_graph_is_captured():
    """Theirs are those of the seed, whatever is captured meanwhile."""
    torch.cuda.manual_seed(7)
    expected = [torch.randn(1000, device="cuda") for _ in range(4)]
    DRAWN.clear(), ERRORS.clear()

    def draw():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                DRAWN.append(torch.randn(1000, device="cuda"))
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            ERRORS.append(error)

    def fault(x):
        if capturing():
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()

    encoder = faulty(fault, SIZES)  # whose weights set the seed
    torch.cuda.manual_seed(7)
    encoder.capture()
    DRAWN.append(torch.randn(1000, device="cuda"))
    assert not ERRORS
    assert len(DRAWN) == len(expected)
    assert all(map(torch.equal, DRAWN, expected))


@pytest.mark.parametrize("module_draws", [False, True])
def test_no_number_is_drawn_twice_or_of_another_seed_while_graphs_are_captured(module_draws):
    """A draw may raise at the moment when a capture begins, and all the time if the module draws."""
    module = Faulty(lambda out: torch.rand_like(out) if module_draws else out, SIZES).to("cuda")
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget(rows, items=8) for rows in SIZES], SPEC)
    torch.cuda.manual_seed(7)
    first = torch.randint(2**62, (), device="cuda")
    torch.cuda.manual_seed(7)
    stop, drawn, errors = threading.Event(), [], []

    def draw():
        numbers = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                try:
                    numbers.append(torch.randint(2**62, (), device="cuda"))
                except RuntimeError as error:
                    errors.append(str(error))
                if len(numbers) == 50:  # few tensors at a time: captures take snapshots of all memory
                    drawn.extend(torch.stack(numbers).tolist())
                    numbers.clear()
            drawn.extend(one.item() for one in numbers)

    def work(number):
        if number:
            return draw()
        try:
            for _ in range(15):
                encoder.release()
                encoder.capture()
        finally:
            stop.set()

    run_in_threads(work, count=4)
    assert all("Offset increment outside graph capture" in error for error in errors)
    assert len(set(drawn)) == len(drawn) > 1000
    if not module_draws:
        assert len(errors) < len(drawn) / 10
        torch.cuda.manual_seed(7)
        expected = [torch.randint(2**62, (), device="cuda") for _ in drawn]
        assert sorted(drawn) == sorted(torch.stack(expected).tolist())
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.randint(2**62, (), device="cuda"), first)


PRELUDE = """
    import os, threading
    import torch
    import varlen_graphs as vg
    from tests.support.encoders import Attention, attention_spec

    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(16,)))
    rows = torch.ones(6, 16, device="cuda")

    def make(module=None):
        return vg.GraphedEncoder((module or Attention(16)).to("cuda"), [256, 512], spec)

    encoder = make()
    expected = encoder(rows, lengths=[6])
"""

run_on_gpu = partial(run_script, prelude=PRELUDE)


def test_a_forked_process_is_told_that_graphs_do_not_survive():
    printed, _ = run_on_gpu("""
    child = os.fork()
    if child == 0:
        told = 0
        for use in (lambda: encoder(rows, lengths=[6]), encoder.capture, encoder.release, encoder.check):
            try:
                use()
            except vg.errors.StaleGraphError:
                told += 1
        print(told, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(encoder(rows, lengths=[6]), expected)
    print("whole")
    """)
    assert printed == ["4", "whole"]


def test_the_interpreter_ends_with_work_in_the_queue():
    printed, _ = run_on_gpu("""
    encoder.self = encoder
    other = vg.GraphedEncoder(encoder.module, [256], spec, pool=encoder.pool)(rows, lengths=[6])
    torch.cuda._sleep(2_000_000_000)
    encoder(rows, lengths=[6])
    print("ready", flush=True)
    """)
    assert printed == ["ready"]


def test_the_interpreter_ends_while_threads_replay_and_capture():
    printed, _ = run_on_gpu(
        """
    began = threading.Event()  # daemon threads may use CUDA while it is taken down: the end may be an error, but comes

    def replay():
        while True:
            encoder(rows, lengths=[6])

    def capture():
        while True:
            make().capture()
            began.set()

    for work in (replay, replay, capture):
        threading.Thread(target=work, daemon=True).start()
    began.wait()
    print("ready", flush=True)
    """,
        ends=None,
    )
    assert printed == ["ready"]
