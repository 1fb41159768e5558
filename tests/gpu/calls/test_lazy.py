"""The life of a server on real CUDA graphs: lazy capture, budgets that come and go, a limit of memory, a second start."""

import gc
import json
from functools import partial

import pytest
import torch

import varlen_graphs as vg
from tests.support import encoders
from tests.support.encoders import Attention, attention_encoder, attention_spec, captured, wait_for
from tests.support.gpu import LARGER, on_gpus, pixels_on_gpu, rows_on_gpu, tower_on_gpu
from tests.support.threads import run_in_threads

pytestmark = on_gpus()

SPEC = attention_spec(rows=vg.inputs.Rows("x", shape=(16,)))
BUDGETS = tuple(vg.budgets.Budget(rows, items=8) for rows in (256, 1024, 2048, 4096))

check = partial(encoders.check, make_rows=rows_on_gpu, tolerance=2e-4)


def attention_on_gpu(budgets=BUDGETS, **options):
    return attention_encoder(budgets, Attention(16).to("cuda"), SPEC, backend="cuda", **options)


@pytest.mark.parametrize("on_device", [False, True])
def test_budgets_are_captured_between_calls_and_timed_as_they_come(on_device):
    encoder = attention_on_gpu(capture=vg.options.Capture(lazy=True))
    check(encoder, [200], on_device)
    assert encoder.stats.eager == {"not captured yet": 1}
    assert encoder.capture_pending() == [BUDGETS[0]]
    assert captured(encoder) == {BUDGETS[0], BUDGETS[-1]}
    assert encoder.costs.measured
    assert set(encoder.executor.store.budgets.measured.replays) == captured(encoder)
    assert set(encoder.costs.replays) == set(BUDGETS)
    check(encoder, [900], on_device)
    for _ in range(4):  # as long as calls want more; one that is faster without a graph wants none
        encoder.capture_pending()
        check(encoder, [900], on_device)
    assert set(encoder.executor.store.budgets.measured.replays) == captured(encoder)


def test_a_fully_captured_lazy_encoder_does_not_sync():
    encoder = attention_on_gpu(capture=vg.options.Capture(lazy=True)).capture()
    rows, lengths = rows_on_gpu([200, 30]), torch.tensor([200, 30], device="cuda")
    expected = encoder(rows, lengths=lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = encoder(rows, lengths=lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got, expected)


def test_calls_go_on_while_a_thread_captures():
    encoder = attention_on_gpu(capture=vg.options.Capture(lazy=True))
    future = encoder.capture_in_background()
    wrong = []

    def work(seed):
        for i in range(60):
            lengths = [1 + (seed * 131 + i * 97) % 900, 1 + i]
            rows = rows_on_gpu(lengths, seed)
            got = encoder(rows, lengths=torch.tensor(lengths, device="cuda") if i % 2 else lengths)
            expected = encoder.eager(rows, lengths=lengths)
            if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
                wrong.append((seed, i))

    run_in_threads(work)
    encoder.check()
    assert not wrong
    wait_for(encoder, [BUDGETS[-1]])
    assert not future.done()
    future.cancel()
    gc.collect()


def test_small_budgets_after_the_largest_take_no_more_of_the_pool():
    encoder = attention_on_gpu(capture=vg.options.Capture(lazy=True))
    check(encoder, [200])
    encoder.capture_pending()
    held = encoder.pool.bytes()
    encoder.capture()
    assert encoder.pool.bytes() <= held + (8 << 20)


def test_budgets_come_and_go():
    encoder = attention_on_gpu(BUDGETS[1:3]).capture()
    check(encoder, [200])
    encoder.add_budget(BUDGETS[0])
    assert BUDGETS[0] in encoder.executor.store.budgets.measured.replays
    check(encoder, [200])
    encoder.add_budget(BUDGETS[3])  # the arena is made anew
    assert captured(encoder) == set(BUDGETS)
    for lengths in ([200], [4000], [1500]):
        check(encoder, lengths)
    encoder.drop_budget(BUDGETS[3])
    torch.cuda.synchronize()
    for lengths in ([200], [2000], [4000]):
        check(encoder, lengths)
    assert "larger than every budget" in encoder.stats.eager


def test_a_limit_of_memory_is_kept_and_memory_goes_back():
    tower = tower_on_gpu(**LARGER)
    grid = [(1, 14, 14), (1, 20, 20)]
    rows = pixels_on_gpu(grid)
    free = vg.recipes.qwen3_vl(tower, vg.Ladder(256, 16_384, step=1.5)).capture()
    expected, held = free(rows, grid_thw=grid), free.bytes()
    free.release()
    torch.cuda.empty_cache()
    for lazy in (False, True):
        encoder = vg.recipes.qwen3_vl(
            tower, vg.Ladder(256, 16_384, step=1.5), memory=held // 2, capture=vg.options.Capture(lazy=lazy)
        )
        encoder.capture()
        assert 0 < encoder.bytes() <= held // 2
        assert encoder.pool.bytes() <= held // 2
        assert 256 <= max(captured(encoder)).rows < 16_384
        got = encoder(rows, grid_thw=grid)
        torch.testing.assert_close(got.pooler_output, expected.pooler_output, rtol=3e-2, atol=3e-2)
        encoder.release()
        torch.cuda.empty_cache()
    auto = vg.recipes.qwen3_vl(tower, vg.Ladder.auto(held // 2)).capture()
    assert 0 < auto.bytes() <= held // 2
    auto.release()


@pytest.mark.filterwarnings("ignore:no graph fits")
def test_too_little_memory_for_any_graph_leaves_none_behind():
    encoder = attention_on_gpu(memory="1MiB")
    for _ in range(2):
        check(encoder, [200])
    assert encoder.stats.eager["its budget exceeds the memory limit"] >= 2
    assert encoder.bytes() == 0
    assert encoder.pool.bytes() == 0


def test_a_second_start_does_not_measure(tmp_path, monkeypatch):
    path = tmp_path / "warm.json"
    first = attention_on_gpu(capture=vg.options.Capture(lazy=True, warmup=path))
    check(first, [200])
    first.capture()
    for _ in range(3):
        check(first, [900])
    first.save_warmup(path)
    assert json.loads(path.read_text())["encoders"][0]["attention"]

    def refuse(*args):
        raise AssertionError("was measured")

    monkeypatch.setattr("varlen_graphs.graphs.calibrate.events_around", refuse)
    second = attention_on_gpu(capture=vg.options.Capture(lazy=True, warmup=path))
    assert second.costs.as_json() == first.executor.store.budgets.measured.as_json()
    used = set(first.stats.replays)
    assert set(second.capture_pending(None)) == used
    assert captured(second) == used | {BUDGETS[-1]}
    second.capture()
    check(second, [900])
    assert "budgets timed in" not in second.executor.store.seconds
