"""Verification of real CUDA graphs: of the pool, of what CUDA alone freezes, and in service."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, encoder_of
from tests.support.gpu import on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.towers import distance, equal_bits, qwen3_vl_tower
from tests.support.verifying import WrongAt64, calls_of, refused

pytestmark = on_gpus()

BUDGETS = [vg.budgets.Budget(512, items=8, segments=40), vg.budgets.Budget(1024, items=8, segments=64)]
GRIDS = [[(1, 14, 14), (1, 8, 20)], [(4, 10, 10), (1, 14, 14), (2, 2, 2)], [(1, 2, 2)], [(1, 24, 40), (1, 30, 30)]]


def calls_of_grids(grids, dtype=torch.bfloat16):
    return [
        {"hidden_states": pixels_on_gpu(grid, seed, dtype), "grid_thw": torch.tensor(grid, device="cuda")}
        for seed, grid in enumerate(grids)
    ]


@pytest.fixture(scope="module")
def tower():
    return tower_on_gpu(dtype=torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_tower_is_verified_against_itself(dtype):
    tower = qwen3_vl_tower(0, hidden_size=288, num_heads=4).to("cuda").to(dtype)
    tower.rotary_pos_emb.float()  # .to(dtype) cast the frequencies; the original computes them in float32
    verified = vg.recipes.qwen3_vl(tower, BUDGETS).verify(calls_of_grids(GRIDS, dtype))
    assert verified.budgets == tuple(BUDGETS)
    assert verified.tolerance == {torch.bfloat16: 3e-2}.get(dtype, 5e-3)  # float32: TF32 in the convolution of patches


def test_a_compiled_forward_is_verified(tower):
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS[:1], capture=vg.options.Capture(compile=True))
    assert encoder.verify(calls_of_grids(GRIDS[:3])).calls == 3


def encoder_on_gpu(module, **options):
    budgets = [vg.budgets.Budget(64), vg.budgets.Budget(128)]
    return encoder_of(module.to("cuda"), budgets=budgets, backend="cuda", **options)


def test_what_mixes_rows_is_named_by_its_line():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    message = refused(encoder_on_gpu(Mean(8, 8)), calls_of([5, 9], device="cuda"))
    assert "aten.mean.dim" in message
    assert "return super().forward(x - x.mean(0))" in message


FACTOR = SimpleNamespace(scale=1.0)
"""A global, which nothing watches."""


def test_a_number_that_the_graph_froze_is_told(monkeypatch):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * FACTOR.scale

    encoder = encoder_on_gpu(Scaled(8, 8)).capture()
    monkeypatch.setattr(FACTOR, "scale", 2.0)
    assert "since the capture: a Python number or branch" in refused(encoder, calls_of([5, 9], device="cuda"))


def test_memory_that_a_replay_reads_and_does_not_write_is_told():
    class Plain(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x)

    def forward(module, x):
        left = torch.empty_like(x)
        left[:1] = 0  # the rest is what the pool holds
        return nn.functional.linear(x, module.weight, module.bias) + left

    encoder = encoder_on_gpu(Plain(8, 8), forward=forward, verify=vg.options.Verify(at_capture=False))
    message = refused(encoder, calls_of([5, 9], device="cuda"))
    assert "differs by inf from the module itself" in message


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_cache_in_the_pool_is_found():
    """Filled in the capture alone, so its memory is the pool's, which others write."""

    class Cached(nn.Linear):
        kept = None

        def forward(self, x):
            if torch.cuda.is_current_stream_capturing():
                if self.kept is None:
                    self.kept = x.new_ones(8)
                return super().forward(x) * self.kept
            return super().forward(x)

    encoder = encoder_on_gpu(Cached(8, 8))
    encoder.capture()
    assert "Budget(" in refused(encoder, calls_of([5, 9], device="cuda"))


def test_outputs_of_other_encoders_of_the_pool_are_right_afterwards():
    pool = vg.options.Pool()
    one, other = (attention_encoder(module=Attention(64).cuda(), backend="cuda", pool=pool) for _ in range(2))
    rows = torch.randn(60, 64, device="cuda")
    before = other(rows, lengths=[20, 40])
    one.verify([{"x": rows, "lengths": [20, 40]}, {"x": rows[:7], "lengths": [7]}])
    assert equal_bits(other(rows, lengths=[20, 40]), before)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_a_budget_that_is_wrong_is_out_of_use(caplog, where):
    encoder = encoder_on_gpu(WrongAt64(), verify=1)
    (call,) = calls_of([5, 9], device="cuda")
    if where == "gpu":
        call["lengths"] = torch.tensor([5, 9], device="cuda")
    with torch.no_grad():
        expected = encoder.module.linear(call["x"])
    with caplog.at_level(logging.ERROR, "varlen_graphs"):
        for _ in range(4):
            assert distance(encoder(**call), expected) < 1e-5
    assert encoder.stats.wrong == {vg.budgets.Budget(64): 1} or not encoder.stats.replays[vg.budgets.Budget(64)]
    assert len(caplog.records) == encoder.stats.wrong.total()


def test_after_so_many_calls_nothing_syncs(tower):
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(512, items=8, segments=128)], verify=1)
    rows, grid = pixels_on_gpu(GRIDS[0]), torch.tensor(GRIDS[0], device="cuda")
    expected = encoder(rows, grid_thw=grid)
    encoder(rows, grid_thw=grid)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = encoder(rows, grid_thw=grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert equal_bits(out, expected)
    assert encoder.stats.checked.total() == 1
