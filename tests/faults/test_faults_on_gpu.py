"""What of the fourteen takes real CUDA graphs to see."""

import threading

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.segments import relative
from tests.support.towers import equal_bits

pytestmark = on_gpus()

DIM, HEADS = 64, 4


class Layers(nn.Module):
    """Attention over attention, by one backend."""

    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.backend = backend
        self.layers = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(3))

    def forward(self, x, cu_seqlens, max_seqlen):
        for qkv in self.layers:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
            x = x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen, backend=self.backend).flatten(1)
        return x


class Test02PaddingPoisonsRealRows:
    @pytest.mark.parametrize("backend", ["triton", "torch"])
    def test_nine_graphs_of_one_pool_leave_nothing_to_the_rows_of_a_call(self, backend):
        budgets = [vg.budgets.Budget(256 * n, items=8) for n in range(1, 10)]
        spec = vg.BufferSpec(
            vg.inputs.Rows("x", (DIM,)), vg.Lengths(), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
        )
        encoder = vg.GraphedEncoder(Layers(backend).to("cuda", torch.bfloat16), budgets, spec).capture()
        lengths = [900, 296]
        rows = torch.randn(sum(lengths), DIM, device="cuda", dtype=torch.bfloat16)
        alone = [encoder.eager(part, lengths=[len(part)]) for part in rows.split(lengths)]
        layout = torch.tensor(lengths, device="cuda")  # always a replay
        clean = encoder(rows, lengths=layout)
        assert relative(clean, torch.cat(alone)) < 3e-2
        full = torch.full((budgets[-1].rows, DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            encoder.poison()
            assert equal_bits(encoder(rows, lengths=layout), clean)
            encoder(full, lengths=torch.tensor([len(full)], device="cuda"))
            assert equal_bits(encoder(rows, lengths=layout), clean)
        encoder.check()


class Growing(nn.Module):
    """Keeps a table for the largest call so far; a larger one drops it."""

    table = None

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.full((len(x), DIM), 3.0, device=x.device)
        return x + self.table[: len(x)]


class Test06FreedOrMovedMemoryIsReplayed:
    def test_a_cache_that_a_larger_call_replaced_is_held_or_told(self):
        encoder = vg.GraphedEncoder(Growing(), [64, 128], vg.BufferSpec(vg.inputs.Rows("x", (DIM,)), vg.Lengths()))
        small, layout = torch.ones(5, DIM, device="cuda"), torch.tensor([5], device="cuda")
        assert (encoder(small, lengths=layout) == 4).all()
        encoder(torch.ones(4096, DIM, device="cuda"), lengths=[4096])  # runs eager
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        junk = [torch.full((rows, DIM), torch.nan, device="cuda") for rows in (64, 128) for _ in range(32)]
        try:
            again = encoder(small, lengths=layout)
        except vg.errors.StaleGraphError:
            encoder.release()
            again = encoder(small, lengths=layout)
        assert (again == 4).all()
        del junk


class Test08SlowerThanEagerAndNobodyNotices:
    def test_a_call_far_below_the_only_budget_runs_without_its_padding(self):
        module = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).to("cuda", torch.bfloat16)
        spec = vg.BufferSpec(vg.inputs.Rows("input", (4096,)), vg.Lengths())
        encoder = vg.GraphedEncoder(module, [16_384], spec).capture()
        encoder(torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16), lengths=[64])
        assert encoder.stats.eager == {"faster without padding": 1}
        assert "faster without padding" in encoder.report()


class Test09MemoryAndStartUp:
    def test_sixteen_budgets_take_little_more_memory_than_the_largest(self):
        def memory(budgets):
            module = nn.Sequential(nn.Linear(DIM, 4096), nn.GELU(), nn.Linear(4096, DIM)).to("cuda", torch.bfloat16)
            encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.inputs.Rows("input", (DIM,)), vg.Lengths()))
            used = encoder.capture().pool.bytes()
            encoder.release()
            return used

        largest = memory([8192])
        assert memory([512 * n for n in range(1, 17)]) < 1.5 * largest


class Test11OtherThreads:
    def test_a_thread_that_pins_and_uploads_survives_captures_and_they_survive_it(self):
        stop, failures, rounds = threading.Event(), [], []

        def work():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    while not stop.is_set():
                        batch = torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True)
                        rounds.append(batch.sum().item())
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            spec = vg.BufferSpec(
                vg.inputs.Rows("x", (DIM,)), vg.Lengths(), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
            )
            for _ in range(5):
                module = Layers("triton").to("cuda", torch.bfloat16)
                encoder = vg.GraphedEncoder(module, [128, 256, 512], spec).capture()
                rows = torch.randn(100, DIM, device="cuda", dtype=torch.bfloat16)
                assert relative(encoder(rows, lengths=[100]), encoder.eager(rows, lengths=[100])) < 3e-2
        finally:
            stop.set()
            thread.join()
        assert not failures
        assert set(rounds) == {float(1 << 16)}
