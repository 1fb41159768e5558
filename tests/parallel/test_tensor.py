"""`parallel.TensorParallelEncoder`: groups of processes over gloo, and what one process can show."""

import math
import re
import threading

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_encoder
from tests.support.ranks import check_scenario, run_groups
from tests.support.tensor_scenarios import SCENARIOS
from varlen_graphs.capture.collectives import DryRun
from varlen_graphs.parallel.deadline import Deadline
from varlen_graphs.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_groups("tests.support.tensor_scenarios", SCENARIOS, tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize(
    ("group", "scenario"),
    [(group, scenario.__name__) for group, (_, scenarios) in SCENARIOS.items() for scenario in scenarios],
)
def test_a_group_of_processes(results, group, scenario):
    check_scenario(results[group], scenario)


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_group_of_one_is_the_encoder(group_of_one):
    rows = torch.randn(8, 8)
    alone = vg.parallel.TensorParallelEncoder(attention_encoder())
    assert torch.equal(alone(rows, lengths=[5, 3]), attention_encoder()(rows, lengths=[5, 3]))
    assert repr(alone).endswith("captured), rank 0 of 1)")
    alone.check()


def test_encoders_and_options_that_cannot_be(group_of_one):
    captured = attention_encoder()
    captured(torch.randn(8, 8), lengths=[8])
    for encoder, options, message in (
        (captured, {}, "the encoder has captured graphs without the other ranks: expected a new encoder"),
        (attention_encoder(verify=1), {}, "expected an encoder without it; call encoder.verify"),
        (
            attention_encoder(capture=vg.options.Capture(lazy=True)),
            {},
            r"Capture\(lazy=True\) and Capture\(exact=N\) capture when one rank alone has time",
        ),
        (attention_encoder(memory="1GiB"), {}, "memory= disables budgets by the memory of one rank alone"),
        (attention_encoder(vg.Ladder.auto("1GiB")), {}, r"for example Ladder\.auto\(memory, bytes_per_row\)"),
        (
            attention_encoder(capture=vg.options.Capture(compile=True)),
            {},
            r"Capture\(compile=True\) may reorder collectives",
        ),
        (attention_encoder(), {"deadline": 0}, "deadline=0: expected finite seconds above 0"),
        (attention_encoder(), {"deadline": math.inf}, "deadline=inf: expected finite seconds above 0"),
        (attention_encoder(), {"deadline": 1e12}, "deadline=1000000000000.0: expected finite seconds above 0"),
    ):
        with pytest.raises(vg.errors.SpecError, match=message):
            vg.parallel.TensorParallelEncoder(encoder, **options)
    with pytest.raises(vg.errors.SpecError, match=r"Attention has no blocks with attn\.qkv"):
        vg.parallel.tensor_plan(captured.module)


def test_budgets_do_not_come_and_go(group_of_one):
    alone = vg.parallel.TensorParallelEncoder(attention_encoder())
    budgets = alone.encoder.budgets
    for _ in range(2):  # before anything is captured, and after that
        for change in (lambda: alone.encoder.add_budget(32), lambda: alone.encoder.drop_budget(budgets[0])):
            with pytest.raises(vg.errors.SpecError, match="have agreed on their budgets, which cannot change"):
                change()
        assert alone.encoder.budgets == budgets
        alone(torch.randn(8, 8), lengths=[5, 3])
        assert len(alone.encoder.executor.store) == len(budgets)


def test_without_a_process_group_the_error_says_how_to_make_one():
    with pytest.raises(vg.errors.SpecError, match="launch with torchrun, and call"):
        vg.parallel.TensorParallelEncoder(attention_encoder())


def failing(error):
    """An encoder whose module raises an error."""

    class Fails(nn.Linear):
        def forward(self, input):
            raise error

    spec = vg.BufferSpec("input", vg.Lengths())
    return vg.parallel.TensorParallelEncoder(vg.GraphedEncoder(Fails(8, 8), [64], spec, backend="eager"))


@pytest.mark.parametrize(
    "words",
    [
        "no luck",
        "no weights at /models/igloo: Connection closed by peer",
        "[models/gloo/loader.py] Timed out waiting 3000ms",
        "the tokenizer raised: Application timeout caused pair closure",
    ],
)
def test_errors_of_the_module_are_not_those_of_the_group(group_of_one, words):
    alone = failing(RuntimeError(words))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(words)):
            alone(torch.randn(8, 8), lengths=[8])


GLOO = "/third_party/gloo/gloo/transport/tcp/"
"""In what errors of gloo begin with, behind where torch was built."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"[..{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:5047. This is typically caused by"),
        RuntimeError(f"[/pytorch{GLOO}pair.cc:537] Read error [127.0.0.1]:30372: Connection reset by peer"),
        RuntimeError(f"[/pytorch{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
        RuntimeError(f"[enforce fail at /pytorch{GLOO}pair.cc:456] op.preamble.length <= op.nbytes. 66668 vs 4."),
        RuntimeError("Application timeout caused pair closure"),
        torch.distributed.DistBackendError("NCCL error"),
        torch.distributed.DistNetworkError("Broken pipe"),
    ],
)
def test_errors_of_collectives_are_those_of_the_group(group_of_one, error):
    alone = failing(error)
    for _ in range(2):
        with pytest.raises(vg.errors.RankError, match="cannot be used any more: end the process"):
            alone(torch.randn(8, 8), lengths=[8])


def test_a_dry_run_needs_no_other_rank(group_of_one):
    """Of no group that there is: nothing is sent."""
    collectives = torch.ops._c10d_functional
    x = torch.randn(4, 6)
    with DryRun():
        reduced = collectives.all_reduce(x, "sum", "none")
        gathered = collectives.all_gather_into_tensor(x, 2, "none")
        several = collectives.all_gather_into_tensor_coalesced([x, x.double()], 3, "none")
        scattered = collectives.reduce_scatter_tensor(x, "sum", 2, "none")
        written = collectives.all_reduce_(x, "sum", "none")
        assert collectives.wait_tensor(gathered) is gathered
    assert [tuple(t.shape) for t in (reduced, gathered, scattered)] == [(4, 6), (8, 6), (2, 6)]
    assert [(tuple(t.shape), t.dtype) for t in several] == [((12, 6), torch.float32), ((12, 6), torch.float64)]
    assert written is x
    assert not any(t.any() for t in (reduced, gathered, scattered, *several))


def test_after_the_deadline_the_group_is_aborted_and_graphs_are_freed(group_of_one, caplog, monkeypatch):
    encoder, aborted = attention_encoder(), threading.Event()
    monkeypatch.setattr(Ranks, "abort", lambda ranks: aborted.set())
    alone = vg.parallel.TensorParallelEncoder(encoder, deadline=7)
    alone(torch.randn(8, 8), lengths=[5, 3])
    assert len(encoder.executor.store)
    alone.give_up()  # as the deadline does
    assert aborted.wait(30)
    assert not len(encoder.executor.store)
    for call in (lambda: alone(torch.randn(8, 8), lengths=[8]), alone.check, alone.capture):
        with pytest.raises(
            vg.errors.RankError, match="no call ended for 7 s, so the group was aborted: a rank of the group"
        ):
            call()
    assert "no call ended for 7 s" in caplog.text


class Clock:
    """Seconds that pass when they are told to, and events of what runs on a GPU."""

    def __init__(self, monkeypatch):
        self.now, self.recorded, self.ended = 0.0, [], set()
        self.monkeypatch = monkeypatch
        monkeypatch.setattr("varlen_graphs.parallel.deadline.time.monotonic", lambda: self.now)

    def deadline(self, seconds):
        clock = self

        class Event:
            def record(self, stream):
                clock.ended.discard(self)
                clock.recorded.append(self)

            def query(self):
                return self in clock.ended

        clock.monkeypatch.setattr("varlen_graphs.parallel.deadline.torch.cuda.Event", Event)
        clock.monkeypatch.setattr("varlen_graphs.parallel.deadline.current_stream", lambda device: None)
        deadline = Deadline(seconds, torch.device("cpu"), lambda: None)
        deadline.close()  # its thread ends at once: the tests ask themselves
        return deadline


def test_calls_that_end_are_never_late(monkeypatch):
    clock = Clock(monkeypatch)
    deadline = clock.deadline(10)
    assert not deadline.is_late()
    for _ in range(5):
        clock.now += 8
        deadline.watch()
        assert not deadline.is_late()
        clock.ended |= {*clock.recorded}
        clock.now += 8
        assert not deadline.is_late()


def test_a_queue_of_calls_is_late_only_if_none_of_them_ends(monkeypatch):
    clock = Clock(monkeypatch)
    deadline = clock.deadline(10)
    for _ in range(5):
        deadline.watch()
    for event in [*clock.recorded]:
        clock.now += 9
        assert not deadline.is_late()
        clock.ended.add(event)
        assert not deadline.is_late()
    clock.now += 100
    assert not deadline.is_late()
    deadline.watch()
    clock.now += 10.5
    assert deadline.is_late()


def test_the_thread_tells_that_a_call_is_late_and_sleeps_before(monkeypatch):
    told, seen, hangs = threading.Event(), threading.Event(), threading.Event()

    class Event:
        def record(self, stream):
            pass

        def query(self):
            seen.set()
            return not hangs.is_set()

    monkeypatch.setattr("varlen_graphs.parallel.deadline.torch.cuda.Event", Event)
    monkeypatch.setattr("varlen_graphs.parallel.deadline.current_stream", lambda device: None)
    deadline = Deadline(0.01, torch.device("cpu"), told.set)
    deadline.watch()
    assert seen.wait(30)
    assert not told.wait(0.1)
    hangs.set()
    deadline.watch()
    assert told.wait(30)
