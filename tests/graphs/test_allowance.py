"""`Allowance`: default budgets are kept as far as memory and time allow; budgets that were given always are."""

import time
from array import array
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import rows_for

resource = pytest.importorskip("resource")

WIDE, TIMES = 2500, 10


class Hungry(torch.nn.Module):
    """Allocates 100 KB for each row, a tenth of it at a time: a tape keeps it all."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(TIMES):
            x = x * self.scale + x[:, :1].expand(-1, WIDE).contiguous()[:, :1]
        return x


GONE_BY = array("d", [0.0])
"""Seconds that a clock is ahead; captures do not look into an array, and so do not undo what runs write there."""


@pytest.fixture
def clock(monkeypatch):
    """The clock, which modules set forward instead of sleeping."""
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + GONE_BY[0])


class Slow(torch.nn.Module):
    """Takes a tenth of a second for each picture."""

    def forward(self, pictures):
        GONE_BY[0] += 0.1 * len(pictures)
        return pictures.mean((1, 2, 3))


class SlowAtFirst(torch.nn.Module):
    """Takes a quarter of a second for one row."""

    def forward(self, x):
        GONE_BY[0] += 0.25 * (len(x) == 1)
        return x * 2


@contextmanager
def memory_left(size):
    """Let the process allocate no more than so many bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def hungry_encoder(budgets, **options):
    return vg.GraphedEncoder(Hungry().eval(), budgets, vg.BufferSpec("x", vg.Lengths()), backend="tape", **options)


def test_default_budgets_stay_within_half_of_the_memory_and_the_report_says_so():
    rows = rows_for([100, 20])
    with torch.no_grad(), memory_left(600 << 20):
        encoder = hungry_encoder(None)
        assert torch.equal(encoder(rows, lengths=[100, 20]), encoder.module(rows))
        assert encoder.bytes() < 350e6
    enabled = [budget.rows for budget in encoder.budgets if budget not in encoder.disabled]
    assert 1000 < max(enabled) < 3500
    smallest = min(encoder.disabled).rows
    assert (
        f"{len(encoder.disabled)} of 79 default budgets, of {smallest} to 16384 rows, are left out" in encoder.report()
    )
    assert f"of {smallest} rows a graph may take up to 0." in encoder.report()
    long = rows_for([9000])
    with torch.no_grad():
        assert torch.equal(encoder(long, lengths=[9000]), encoder.module(long))
    (reason,) = encoder.stats.eager
    assert reason == "its default budget takes too much memory or time"
    assert "GB may be used" in encoder.stats.details[reason]


def test_no_more_tapes_are_captured_than_memory_holds():
    with torch.no_grad(), memory_left(600 << 20):
        encoder = vg.GraphedEncoder(
            Hungry().eval(), None, vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths()), backend="tape"
        ).capture()
        assert encoder.bytes() < 0.8 * (600 << 20)  # whichever budgets a busy machine had time for
    assert encoder.disabled


def test_budgets_that_were_given_are_never_left_out():
    rows = rows_for([100, 20])
    with torch.no_grad(), memory_left(600 << 20):
        encoder = hungry_encoder([256, 3300])
        assert torch.equal(encoder(rows, lengths=[100, 20]), encoder.module(rows))
    assert not encoder.disabled
    assert "left out" not in encoder.report()


def test_budgets_are_measured_again_after_a_release():
    rows = rows_for([100, 20])
    with torch.no_grad():
        with memory_left(600 << 20):
            encoder = hungry_encoder(vg.budgets.DefaultBudgets([256, 512, 4000]))
            encoder(rows, lengths=[100, 20])
            assert [budget.rows for budget in encoder.disabled] == [4000]
            encoder.release()
            assert not encoder.disabled
        assert torch.equal(encoder(rows, lengths=[100, 20]), encoder.module(rows))
    assert not encoder.disabled


def test_default_budgets_are_bounded_by_the_time_until_the_first_answer(clock):
    spec = vg.BufferSpec("pictures", vg.Batch(), outputs=vg.outputs.Items())
    encoder = vg.GraphedEncoder(Slow().eval(), None, spec, backend="tape", verify=vg.options.Verify(at_capture=False))
    for count in (1, 20):
        pictures = torch.randn(count, 3, 4, 4)
        torch.testing.assert_close(encoder(pictures), pictures.mean((1, 2, 3)))
    assert {budget.items for budget in encoder.disabled} >= {32}
    assert "rows, are left out" in encoder.report()
    assert not encoder.stats.eager


def test_where_items_are_alike_calls_capture_what_they_need_and_no_more():
    spec = vg.BufferSpec("input", vg.Batch())
    encoder = vg.GraphedEncoder(torch.nn.Linear(8, 8).eval(), None, spec, backend="tape")
    for count, captured in ((3, {4}), (1, {1, 4}), (30, {1, 4, 32}), (4, {1, 4, 32})):
        x = torch.randn(count, 8)
        torch.testing.assert_close(encoder(x), encoder.module(x))
        assert {one.rows for graphs in encoder.executor.store.sets for one in graphs.budgets} == captured
    assert encoder.stats.checked.total() == 3  # the first call of each, after the check at its capture


def test_the_proof_leaves_out_what_takes_long_and_the_report_says_so(clock):
    spec = vg.BufferSpec("x", vg.Lengths())
    encoder = vg.GraphedEncoder(SlowAtFirst().eval(), [vg.budgets.Budget(1)], spec, backend="tape")
    rows = torch.ones(1, 8)
    assert torch.equal(encoder(rows, lengths=[1]), rows * 2)
    assert "rows at a time, an eager run of which takes some" in encoder.report()


def test_default_budgets_of_a_speech_tower_of_three_convolutions():
    pytest.importorskip("transformers", minversion="5.20", reason="needs the masks of transformers 5")
    pytest.importorskip("transformers.models.auto.modeling_auto")  # which takes memory when the recipe imports it
    from tests.support.speech_models import clips, error_of, speech_model

    model = speech_model("wav2vec2 large")
    with torch.no_grad(), memory_left(400 << 20):
        encoder = vg.recipes.speech(model, backend="tape")
        call = clips(encoder, [400, 333])
        expected = encoder.module(**call)
        assert error_of(encoder, encoder(**call), expected, [400, 333]) < 1e-5
    assert encoder.stats.replays.total() == 1
    assert "rows, are left out" in encoder.report()
