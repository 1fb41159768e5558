"""`GraphStore` and captures that fail, by faults put into the module: what is left works, and says why."""

import contextlib
import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, rows_for
from tests.support.towers import distance, equal_bits
from varlen_graphs.capture.cuda import CudaCapture

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
SIZES = (96, 192, 256)
"""Other numbers of rows than those that a module is looked at with first."""
BUDGETS = tuple(vg.budgets.Budget(rows, items=8) for rows in SIZES)


def memory_short(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def host_memory_short(x):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to ...")


def refused(x):
    return x * x.sum().item()


def broken(x):
    raise ValueError("no grid of so many blocks")


FAULTS = {"memory": memory_short, "host memory": host_memory_short, "refused": refused, "error": broken}


TRIED = []
"""Numbers of rows with which faulty modules ran; no module keeps it, so captures do not copy it."""


class Faulty(Attention):
    """Does something wrong where rows are of certain numbers, or static arguments of a certain value."""

    def __init__(self, fault, sizes, scales=(1.0, 2.0)):
        super().__init__()
        self.fault, self.sizes, self.scales = fault, sizes, scales

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        TRIED.append(len(x))
        out = super().forward(x, cu_seqlens, max_seqlen, scale)
        return self.fault(out) if len(x) in self.sizes and scale in self.scales else out


def faulty(fault, sizes, **options):
    module = Faulty(fault, sizes, *options.pop("scales", ()))
    return attention_encoder(BUDGETS, module=module, **({"spec": SHAPED} | options))


def captured_with_warnings(encoder, count, **static_args):
    with pytest.warns(
        UserWarning, match="could not be captured, and the budget is disabled: other budgets take"
    ) as warned:
        encoder.capture(**static_args)
    assert len(warned) == count
    return encoder


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, sizes) for name in ("memory", "error") for sizes in [(256,), (192,), (96,), (192, 256)]]
    + [(name, sizes) for name in ("host memory", "refused") for sizes in [(96,), (192, 256)]],
)
def test_a_budget_that_cannot_be_captured_is_out_of_use_and_says_why(name, sizes):
    encoder = captured_with_warnings(faulty(FAULTS[name], sizes), len(sizes))
    line = {
        "memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        "host memory": "RuntimeError: [enforce fail",
        "refused": "Tensor.item reads a tensor on the host at ",
        "error": "ValueError: no grid of so many blocks",
    }[name]
    for rows, text in zip(SIZES, encoder.report().splitlines()[4:], strict=False):
        assert ("disabled: " in text and line in text) is (rows in sizes), text
    for lengths in ([20], [100], [200], [60, 60], [30, 20, 200], [5] * 8):
        rows = rows_for(lengths)
        assert distance(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)) < 1e-5
    largest = max(rows for rows in SIZES if rows not in sizes)
    assert all(budget.rows not in sizes for budget in encoder.stats.replays)
    eager = sum(length > largest for length in (20, 100, 200, 200))
    assert encoder.stats.eager == ({"its budget could not be captured": eager} if eager else {})


@settings(max_examples=25)
@given(
    st.sampled_from([memory_short, host_memory_short]),
    st.sets(st.sampled_from(SIZES), max_size=2),
    st.lists(st.lists(st.integers(1, 255), min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore:the graph of")
def test_whatever_fails_calls_are_answered(fault, sizes, calls, unseen):
    """Also the first, which was planned before anything was captured."""
    encoder = faulty(fault, sizes)
    for lengths in calls:
        rows = rows_for(lengths)
        layout = torch.tensor(lengths) if unseen else lengths
        expected = encoder.eager(rows, lengths=lengths) if not sizes.intersection({sum(lengths), *lengths}) else None
        if expected is not None:
            assert distance(encoder(rows, lengths=layout), expected) < 1e-5
    encoder.check()


@pytest.mark.parametrize("name", FAULTS)
def test_what_fails_at_every_budget_is_raised(name):
    encoder = faulty(FAULTS[name], SIZES)
    error, message = {
        "memory": (
            vg.errors.CaptureError,
            r"(?s)no budget could be captured, because memory is short: .*20.00 GiB.*smaller bud",
        ),
        "host memory": (vg.errors.CaptureError, "no budget could be captured, because memory is short: RuntimeError: "),
        "refused": (
            vg.errors.CaptureError,
            "(?s)Tensor.item reads a tensor on the host.*in refused: return.*MaxSeqlen",
        ),
        "error": (vg.errors.CaptureError, "ValueError: no grid of so many blocks"),
    }[name]
    for _ in range(2):
        TRIED.clear()
        with pytest.raises(error, match=message):
            encoder(rows_for([6]), lengths=[6])
        tried = SIZES if "memory" in name else (96, 256)  # the largest and the smallest
        assert {rows for rows in TRIED if rows in SIZES} == {*tried}
    assert repr(encoder).endswith("0 captured)")
    assert "disabled: " not in encoder.report()
    assert "nothing could be captured: " in encoder.report()
    encoder.module.sizes = ()
    assert distance(encoder(rows_for([6]), lengths=[6]), encoder.eager(rows_for([6]), lengths=[6])) < 1e-6
    assert "nothing could be captured" not in encoder.report()


ALIVE = []


def test_memory_of_a_run_that_failed_is_free_before_the_next():
    def fault(x):
        assert all(reference() is None for reference in ALIVE)
        ALIVE.append(weakref.ref(x))
        memory_short(x)

    gc.disable()
    try:
        encoder = captured_with_warnings(faulty(fault, (256, 192)), 2)
    finally:
        gc.enable()
    assert len(ALIVE) == 3  # at capacity ahead of captures, and in both
    assert repr(encoder).endswith("1 captured)")


def test_memory_of_a_ladder_that_is_given_up_is_free_whoever_keeps_the_error():
    made = []

    class Watched(Faulty):
        def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
            if len(x) == 96:
                raise KeyboardInterrupt
            out = super().forward(x, cu_seqlens, max_seqlen, scale)
            if len(x) in SIZES:
                made.append(weakref.ref(out.untyped_storage()))
            return out

    encoder = attention_encoder(BUDGETS, module=Watched(refused, ()), spec=SHAPED)
    with pytest.raises(KeyboardInterrupt) as kept:
        encoder.capture()
    assert len(made) > 4
    assert not any(reference() for reference in made)
    assert kept.traceback


@pytest.mark.parametrize(
    ("interrupt", "at"),
    [(kind, at) for kind in (KeyboardInterrupt, ZeroDivisionError) for at in range(8)]
    + [(SystemExit, 0), (SystemExit, 5)],
)
def test_an_interrupt_leaves_encoder_and_process_able_to_capture(at, interrupt):
    """In the first looks at the module, in warm-up, while it is watched, and while it is recorded."""
    runs = itertools.count()  # which captures do not look into, and so do not undo

    class Interrupted(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if next(runs) >= at:
                raise interrupt
            return super().forward(x, cu_seqlens, max_seqlen)

    encoder = attention_encoder(module=Interrupted(), spec=SHAPED)
    rows = rows_for([6])
    with warnings.catch_warnings(), contextlib.suppress(vg.errors.CaptureError, interrupt):
        warnings.simplefilter("ignore")  # of budgets that were left out, and graphs that were not proven
        encoder.capture()
    at = 10**9
    other = attention_encoder()
    for each in (other, encoder):
        done = []
        thread = threading.Thread(target=lambda each=each, done=done: done.append(each(rows, lengths=[6])))
        thread.start()  # no lock is held
        thread.join()
        assert distance(done[0], each.eager(rows, lengths=[6])) < 1e-6
    compiled = []
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: compiled.append(1) or graph)(torch.ones(3))
    assert compiled
    assert gc.isenabled()


def test_a_failure_for_other_static_arguments_leaves_the_graphs_there_are():
    encoder = faulty(memory_short, (256,), scales=[(2.0,)]).capture()
    rows = rows_for([200])
    expected = encoder(rows, lengths=[200])
    captured_with_warnings(encoder, 1, scale=2.0)
    assert equal_bits(encoder(rows_for([6]), lengths=[6]), encoder(rows_for([6]), lengths=[6]))
    assert distance(encoder(rows, lengths=[200]), expected) < 1e-6  # no graph that calls are planned for has so many
    assert encoder.stats.eager == {"its budget could not be captured": 1}


def test_a_release_puts_all_budgets_in_use_again():
    encoder = captured_with_warnings(faulty(memory_short, (256,)), 1)
    encoder.release()
    assert "disabled: " not in encoder.report()
    encoder.module.sizes = ()
    encoder(rows_for([200]), lengths=[200])
    assert encoder.stats.replays.total() == 1


def test_where_eager_is_an_error_only_what_a_budget_out_of_use_would_hold_runs_eager():
    encoder = captured_with_warnings(faulty(memory_short, (256,), on_miss="error"), 1)
    rows = rows_for([200])
    assert distance(encoder(rows, lengths=[200]), encoder.eager(rows, lengths=[200])) < 1e-6
    with pytest.raises(
        vg.errors.BudgetError, match=r"largest budget is Budget\(rows=192.*rows=256.* is disabled: OutOfMem"
    ):
        encoder(rows_for([300]), lengths=[300])


def test_a_stage_runs_eager_where_its_budgets_are_out_of_use():
    encoder = captured_with_warnings(faulty(memory_short, (192, 256)), 2)
    for lengths in ([20], [100], [60, 50]):
        rows = rows_for(lengths)
        with encoder.stage(lengths) as stage:
            stage.rows.copy_(rows)
        assert distance(stage.output, encoder.eager(rows, lengths=lengths)) < 1e-6
    assert encoder.stats.eager == {"its budget could not be captured": 2}
    with pytest.raises(vg.errors.BudgetError, match="no budget holds"), encoder.stage([300]):
        pass


@pytest.mark.filterwarnings("ignore:the graph of")
def test_the_first_stage_may_find_that_its_budget_fails():
    encoder, rows = faulty(memory_short, (192, 256)), rows_for([100])
    with encoder.stage([100]) as stage:
        stage.rows.copy_(rows)
    assert distance(stage.output, encoder.eager(rows, lengths=[100])) < 1e-6


def test_an_encoder_without_any_budget_in_use_runs_eager():
    encoder = attention_encoder(spec=SHAPED).capture()
    with encoder.pool.exclusive():
        for budget in encoder.budgets:
            encoder.executor.store.budgets.disable(budget, "for a test", "of no other reason")
    for lengths in ([6], [60, 60], [300]):
        rows = rows_for(lengths)
        for layout in (lengths, torch.tensor(lengths)):
            assert distance(encoder(rows, lengths=layout), encoder.eager(rows, lengths=lengths)) < 1e-6
    assert encoder.stats.eager == {"for a test": 4, "larger than every budget": 2}
    assert encoder.report().count("disabled: of no other reason") == 2
    with encoder.stage([6], scale=2.0) as stage:
        stage.rows.copy_(rows_for([6]))
    assert distance(stage.output, encoder.eager(rows_for([6]), lengths=[6], scale=2.0)) < 1e-6
    with pytest.raises(
        vg.errors.CaptureError, match=r"no budget is enabled; .* of no other reason; encoder.release\(\) enables all"
    ):
        encoder.capture(scale=2.0)
    encoder.release()
    encoder(rows_for([6]), lengths=[6])
    assert encoder.stats.replays.total() == 1


INVALIDATED = RuntimeError("CUDA error: operation failed due to a previous error during capture\nSearch for ...")
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
DRAWS = RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
REFUSED = RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for ...")


@pytest.mark.parametrize(
    ("errors", "raised", "message"),
    [
        ([INVALIDATED], None, None),
        ([SHORT], None, None),
        ([SHORT, SHORT], torch.OutOfMemoryError, "Tried to allocate 2.00 GiB"),
        ([INVALIDATED, INVALIDATED], vg.errors.CaptureError, "(?s)could not be captured: CUDA error: .*previous error"),
        ([INVALIDATED, REFUSED], vg.errors.CaptureError, "not permitted"),
        ([DRAWS], None, None),
        ([INVALIDATED, DRAWS], None, None),
        ([DRAWS, SHORT, SHORT], torch.OutOfMemoryError, "Tried to allocate 2.00 GiB"),
        (
            [REFUSED],
            vg.errors.CaptureError,
            r"(?s)not permitted.*at .*test_store_failures.py.*in capture_once: .*no \.item",
        ),
    ],
)
def test_a_capture_in_whose_way_something_else_was_is_tried_again(monkeypatch, errors, raised, message):
    """Which errors of CUDA that are; real ones are in tests/gpu/graphs/test_store_failures.py."""
    left, drawn = [*errors], []

    def capture_once(self, run, name, draws):
        drawn.append(draws)
        assert not gc.isenabled()
        if left:
            raise left.pop(0)
        return name

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(CudaCapture, "capture_once", capture_once)
    with contextlib.nullcontext() if raised is None else pytest.raises(raised, match=message):
        assert CudaCapture(vg.options.Pool()).capture(list, "graph") == "graph"
    assert not left
    assert drawn == [DRAWS in errors[:tries] for tries in range(len(drawn))]  # whose random numbers the capture takes
    assert gc.isenabled()
