"""Default budgets are kept as far as the memory and the time of a GPU allow."""

from contextlib import contextmanager

import torch

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.gpu import on_gpus

pytestmark = on_gpus()

WIDE = 1 << 16


class Hungry(torch.nn.Module):
    """Has 512 KB for each row in use at a time, and four times as much in all."""

    def forward(self, x):
        for _ in range(4):
            x = x + (x[:, :1].expand(-1, WIDE) * 1.0 + 1.0)[:, :1] - 1.0
        return x


class Slow(torch.nn.Module):
    """Takes an H100 some 0.1 s for each thousand rows."""

    def forward(self, x):
        wide, same = x.repeat(1, 512), torch.eye(8 * 512, device=x.device)
        for _ in range(150):
            wide = wide @ same
        return wide[:, :8].clone()


@contextmanager
def memory_left(size):
    """Let torch allocate no more than so many bytes."""
    device = torch.cuda.current_device()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + size) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_default_budgets_stay_within_half_of_the_memory_of_a_gpu():
    rows, spec = rows_for([100, 20], device="cuda"), vg.BufferSpec("x", vg.Lengths())
    with torch.no_grad(), memory_left(3 << 30):
        encoder = vg.GraphedEncoder(Hungry().eval(), None, spec, backend="cuda")
        torch.testing.assert_close(encoder(rows, lengths=[100, 20]), encoder.module(rows))
    enabled = [budget.rows for budget in encoder.budgets if budget not in encoder.disabled]
    assert 1000 < max(enabled) < 4000
    assert f"{len(encoder.disabled)} of 79 default budgets" in encoder.report()


def test_default_budgets_that_take_a_gpu_long_are_left_out():
    rows, budgets = rows_for([100, 20], device="cuda"), [256, 1024, 2048, 4096, 16_384]
    spec = vg.BufferSpec("x", vg.Lengths())
    with torch.no_grad():
        encoder = vg.GraphedEncoder(Slow().eval(), vg.budgets.DefaultBudgets(budgets), spec, backend="cuda")
        assert torch.equal(encoder(rows, lengths=[100, 20]), encoder.module(rows))
        assert 16_384 in {budget.rows for budget in encoder.disabled}
        assert "rows a run may take up to " in encoder.report()
        given = vg.GraphedEncoder(Slow().eval(), [256, 8192], spec, backend="cuda")
        assert torch.equal(given(rows, lengths=[100, 20]), given.module(rows))
        assert not given.disabled


def test_a_batch_of_pictures_larger_than_what_takes_a_gpu_long_is_split():
    pictures, spec = torch.randn(16, 1024, 8, device="cuda"), vg.BufferSpec("input", vg.Batch())
    module = torch.nn.Sequential(torch.nn.Flatten(0, 1), Slow(), torch.nn.Unflatten(0, (-1, 1024))).eval()
    with torch.no_grad():
        encoder = vg.GraphedEncoder(module, None, spec, backend="cuda")
        assert torch.equal(encoder(pictures), module(pictures))
        assert {8, 16} <= {budget.rows for budget in encoder.disabled}
        assert max(budget.rows for budget in encoder.stats.replays) < 8
        assert encoder.stats.items == 16
        assert not encoder.stats.eager


def test_default_budgets_of_a_small_tower_are_all_kept():
    spec = vg.BufferSpec(vg.inputs.Rows("input", (8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(torch.nn.Linear(8, 8).cuda().eval(), None, spec, backend="cuda")
    with torch.no_grad():
        encoder(rows_for([100, 20], device="cuda"), lengths=[100, 20])
    assert not encoder.disabled
