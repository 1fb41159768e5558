"""The fourteen ways in which CUDA graphs of encoders have hurt their users, each shown not to happen here.

Numbers and order are those of docs/appendix-faults.md. What takes real graphs to see is in test_faults_on_gpu.py.
"""

import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, Attention, attention_encoder, attention_spec, rows_for
from tests.support.segments import relative
from tests.support.towers import equal_bits

DIM = 8


def alone(encoder, rows, lengths):
    """Every item in a call of its own, without graphs."""
    parts = rows.split(lengths)
    return torch.cat([encoder.eager(part, lengths=[len(part)]) for part in parts])


class MeanOfSegment(nn.Module):
    """Unpacks segments to `[segments, max_seqlen]`, as attention kernels do: rows past `max_seqlen` would be lost."""

    def forward(self, x, cu_seqlens, max_seqlen):
        place = torch.arange(max_seqlen, device=x.device)
        index = (cu_seqlens[:-1, None] + place).clamp(max=len(x) - 1)
        own = (place < cu_seqlens.diff()[:, None])[..., None]
        means = torch.where(own, x[index], 0).sum(1) / own.sum(1).clamp(min=1)
        segment = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(len(x), device=x.device), right=True)
        return x + means[segment.clamp(max=len(means) - 1)]


class Test01AHostValueIsFrozen:
    def test_a_segment_longer_than_the_graphs_bound_goes_where_it_is_whole(self):
        budgets = [vg.budgets.Budget(128, items=4, max_seqlen=16), vg.budgets.Budget(256, items=4, max_seqlen=100)]
        encoder = attention_encoder(budgets, MeanOfSegment())
        for lengths in ([3, 5], [60, 40], [16, 17], [100, 2], [101, 7]):
            rows = rows_for(lengths)
            assert relative(encoder(rows, lengths=lengths), alone(encoder, rows, lengths)) < 1e-5, lengths
        assert encoder.stats.eager == {"larger than every budget": 1}

    @pytest.mark.parametrize(
        ("frozen", "remedy"),
        [("int(cu_seqlens.diff().max())", "MaxSeqlen"), ("bool((cu_seqlens.diff() > 8).any())", "torch.where")],
    )
    def test_a_bound_or_a_branch_read_from_the_data_is_refused_by_its_line(self, frozen, remedy):
        class Reading(Attention):
            def forward(self, x, cu_seqlens, max_seqlen):
                return super().forward(x, cu_seqlens, max_seqlen + int(self.longest(cu_seqlens)))

            longest = eval(f"lambda self, cu_seqlens: {frozen}", {"torch": torch})

        encoder = attention_encoder(module=Reading())
        with pytest.raises(vg.errors.CaptureError, match=rf"(?s)reads a tensor on the host.*{remedy}"):
            encoder(rows_for([5, 9]), lengths=[5, 9])

    def test_boundaries_are_those_of_the_call_and_not_of_the_capture(self):
        encoder = attention_encoder([vg.budgets.Budget(64, items=8)])
        for lengths in ([20, 20], [1] * 8, [40], [3, 30, 7]):
            rows = rows_for(lengths)
            assert relative(encoder(rows, lengths=lengths), alone(encoder, rows, lengths)) < 1e-5, lengths
        assert encoder.stats.replays.total() == 4


class TwoLayers(nn.Module):
    """Rows that the first leaves unwritten would become values of the second."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(DIM) for _ in range(2))

    def forward(self, x, cu_seqlens, max_seqlen):
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return x


class Test02PaddingPoisonsRealRows:
    def test_nan_in_every_row_of_padding_and_in_the_pool_changes_no_bit(self):
        encoder = attention_encoder([vg.budgets.Budget(n, items=8) for n in (512, 1024, 2048)], TwoLayers())
        lengths = [900, 296]  # 1,196 rows in a budget of 2,048
        rows = rows_for(lengths)
        clean = encoder(rows, lengths=lengths)
        assert relative(clean, alone(encoder, rows, lengths)) < 1e-5
        encoder.poison()
        assert equal_bits(encoder(rows, lengths=lengths), clean)
        encoder(torch.full((2048, DIM), torch.nan), lengths=[2048])  # what an earlier call leaves behind
        assert equal_bits(encoder(rows, lengths=lengths), clean)


class Boundaries(nn.Module):
    """For each row the shortest and the longest segment of the call, and where the last one ends."""

    def forward(self, x, cu_seqlens):
        lengths = cu_seqlens.diff()
        return torch.stack([lengths.min(), lengths.max(), cu_seqlens[-1]]).expand(len(x), 3)


class Test03ZerosInTheTailOfTheBoundaries:
    def test_an_image_in_a_graph_sized_for_video_has_no_segment_of_negative_length(self):
        spec = vg.BufferSpec("x", vg.GridTHW(), [vg.buffers.CuSeqlens(per="frame")])
        encoder = vg.GraphedEncoder(
            Boundaries(), [vg.budgets.Budget(256, items=4, segments=64)], spec, backend="tape", verify=UNVERIFIED
        )
        for grid in ([(32, 2, 2)], [(1, 4, 4)], [(1, 2, 3), (2, 4, 5)]):
            rows = sum(t * h * w for t, h, w in grid)
            shortest, longest, end = encoder(torch.zeros(rows, 1), grid_thw=grid)[0].tolist()
            assert (shortest, longest, end) == (0, max(h * w for _, h, w in grid), rows)


class Test04FramesAreNotCheckedByThePacker:
    @pytest.mark.parametrize("frames", [8, 9, 16, 17, 40])
    def test_a_video_of_any_number_of_frames_is_right(self, frames):
        spec = vg.BufferSpec("x", vg.GridTHW(), [vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")])
        budgets = [vg.budgets.Budget(64, items=2, segments=8), vg.budgets.Budget(256, items=2, segments=16)]
        encoder = vg.GraphedEncoder(Attention(DIM), budgets, spec, backend="tape")
        rows = rows_for([4 * frames])
        apart = torch.cat([encoder.eager(frame, grid_thw=[(1, 2, 2)]) for frame in rows.split(4)])
        assert relative(encoder(rows, grid_thw=[(frames, 2, 2)]), apart) < 1e-5
        fits = [budget for budget in budgets if frames <= budget.segments]
        assert list(encoder.stats.replays) == fits[:1]
        assert encoder.stats.eager.total() == (not fits)


class Merging(nn.Linear):
    def forward(self, input):
        return super().forward(input).unflatten(0, (-1, 4)).sum(1)


class Test05CapacityIsRoundedDown:
    @pytest.mark.parametrize(
        "budget",
        [vg.budgets.Budget(324, items=8), vg.budgets.Budget(321, items=8), vg.budgets.Budget(324, items=1, segments=1)],
    )
    def test_an_item_of_exactly_the_budgets_size_fits_it(self, budget):
        spec = vg.BufferSpec("input", vg.GridTHW(merge=2), outputs=vg.outputs.Rows(every=4))
        encoder = vg.GraphedEncoder(Merging(DIM, DIM), [budget], spec, backend="tape")
        rows = rows_for([324])
        out = encoder(rows, grid_thw=[(1, 18, 18)])
        assert relative(out, encoder.eager(rows, grid_thw=[(1, 18, 18)])) < 1e-5
        assert (encoder.stats.replays.total(), encoder.stats.eager.total(), encoder.stats.padding) == (1, 0, 0)

    def test_items_and_segments_may_be_exactly_as_many_as_the_budget_has_and_as_long(self):
        encoder = attention_encoder([vg.budgets.Budget(64, items=4, segments=4, max_seqlen=16)])
        rows = rows_for([16] * 4)
        assert relative(encoder(rows, lengths=[16] * 4), alone(encoder, rows, [16] * 4)) < 1e-5
        assert (encoder.stats.replays.total(), encoder.stats.eager.total()) == (1, 0)


FILLED = {}
"""Whether runs of so many rows found nothing cached; no module keeps it, so captures do not copy it."""


class Test06FreedOrMovedMemoryIsReplayed:
    def test_weights_that_were_moved_are_an_error_until_graphs_are_captured_anew(self):
        encoder = attention_encoder()
        rows = rows_for([5])
        encoder(rows, lengths=[5])
        encoder.module.qkv.weight.data = encoder.module.qkv.weight.data.clone()
        with pytest.raises(vg.errors.StaleGraphError, match=r"encoder.release\(\)"):
            encoder(rows, lengths=[5])
        encoder.release()
        assert relative(encoder(rows, lengths=[5]), encoder.eager(rows, lengths=[5])) < 1e-5

    def test_what_a_forward_caches_is_filled_before_the_run_that_is_captured(self):
        class Caching(nn.Module):
            def __init__(self):
                super().__init__()
                self.cache = {}

            def forward(self, x):
                FILLED.setdefault(len(x), []).append(len(x) not in self.cache)
                self.cache.setdefault(len(x), torch.arange(len(x), device=x.device)[:, None] / len(x))
                return x + self.cache[len(x)].sum()

        encoder = vg.GraphedEncoder(
            Caching(), [80, 144], vg.BufferSpec("x", vg.Lengths()), backend="tape", verify=UNVERIFIED
        )
        small, large = rows_for([5]), rows_for([100, 20])
        first = encoder(small, lengths=[5])
        for rows in (80, 144):  # in the capture it would be filled in memory of the pool
            before, *later, captured = FILLED[rows]
            assert (before, captured) == (True, False)
            assert sum(later) <= 1  # of another shadow
        encoder(large, lengths=[100, 20])
        assert equal_bits(encoder(small, lengths=[5]), first)


class Test07OutputsAreOverwrittenByTheNextReplay:
    def test_outputs_are_the_callers_own(self):
        encoder = attention_encoder([vg.budgets.Budget(64, items=4)])
        rows = rows_for([40])
        kept = encoder(rows, lengths=[40])
        before = kept.clone()
        encoder(rows_for([40], seed=1), lengths=[40])
        encoder.poison()
        assert equal_bits(kept, before)


class Test08SlowerThanEagerAndNobodyNotices:
    def test_a_small_image_does_not_pay_for_the_frames_that_videos_may_have(self):
        spec = vg.BufferSpec(vg.inputs.Rows("input", (DIM,)), vg.GridTHW(merge=2))
        encoder = vg.GraphedEncoder(nn.Linear(DIM, DIM), vg.Ladder(256, 16_384), spec, backend="tape")
        encoder(rows_for([256]), grid_thw=[(1, 16, 16)])
        encoder(rows_for([5000]), grid_thw=[(5, 20, 50)])
        assert encoder.stats.padding < 0.05 * encoder.stats.rows

    def test_what_ran_eager_is_counted_by_its_reason_and_shown(self):
        encoder = attention_encoder([vg.budgets.Budget(64, items=4)])
        encoder(rows_for([65]), lengths=[65])
        assert encoder.stats.eager == {"larger than every budget": 1}
        assert "larger than every budget" in encoder.report()


RUNS = []


class Counting(Attention):
    runs = 0

    def forward(self, x, cu_seqlens, max_seqlen):
        self.runs += 1
        RUNS.append(len(x))
        return super().forward(x, cu_seqlens, max_seqlen)


class Test09MemoryAndStartUp:
    def test_a_budget_is_captured_once_and_wrapping_captures_nothing(self):
        module = Counting()
        encoder = attention_encoder(
            [vg.budgets.Budget(64 * n, items=4) for n in range(1, 9)],
            module,
            attention_spec(rows=vg.inputs.Rows("x", (DIM,))),
        )
        assert module.runs == 0
        RUNS.clear()
        encoder.capture()
        # Six runs for what the module keeps, and 27 because it counts them, two probes; of each budget a watched run
        # and the capture, of the first a warm-up; the proof, at most eleven times by replays and nine times eager.
        assert 8 < len(RUNS) <= 35 + 1 + 2 * 8 + 20
        encoder.capture()
        assert module.runs == 0
        before = len(RUNS)
        for _ in range(4):
            encoder(rows_for([100]), lengths=[100])
        # The first call of captured graphs is compared with the module, and one more after that has counted it.
        assert module.runs == len(RUNS) - before == 2


class Test10CaptureErrorsPointNowhere:
    def test_the_error_names_the_line_and_what_lifts_it_and_nothing_else_is_taken_down(self):
        class Reading(Attention):
            def forward(self, x, cu_seqlens, max_seqlen):
                return super().forward(x, cu_seqlens, max_seqlen)[: cu_seqlens[-1].item()]

        broken, rows = attention_encoder(module=Reading()), rows_for([6])
        other = attention_encoder(pool=broken.pool)
        for _ in range(2):
            line = re.escape("[: cu_seqlens[-1].item()]")
            with pytest.raises(
                vg.errors.CaptureError, match=rf"(?s)test_faults\.py:\d+, in forward: .*{line}.*declare"
            ):
                broken(rows, lengths=[6])
        assert relative(broken.eager(rows, lengths=[6]), alone(other, rows, [6])) < 1e-5
        assert relative(other(rows, lengths=[6]), alone(other, rows, [6])) < 1e-5


class Test11OtherThreads:
    def test_a_thread_that_reads_its_own_tensors_and_one_that_captures_do_not_disturb_a_capture(self):
        done, errors = threading.Event(), []

        def read():
            while not done.is_set():
                assert torch.ones(3).sum().item() == 3

        def capture():
            assert attention_encoder()(rows_for([9]), lengths=[9]).isfinite().all()

        def guarded(work):
            try:
                work()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (read, capture, capture)]
        for thread in threads:
            thread.start()
        encoder = attention_encoder([vg.budgets.Budget(64 * n, items=4) for n in range(1, 9)])
        rows = rows_for([9, 8])
        try:
            got = encoder(rows, lengths=[9, 8])
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not errors
        assert relative(got, alone(encoder, rows, [9, 8])) < 1e-5


class Test12EagerAndGraphsDriftApart:
    def test_bytes_are_normalised_by_every_way_through(self):
        normalize = vg.inputs.Normalize([0.2, 0.4, 0.6], [0.5, 0.25, 0.125])
        spec = vg.BufferSpec(vg.inputs.Rows("input", (3 * 4,), torch.uint8, normalize=normalize), vg.Lengths())
        encoder = vg.GraphedEncoder(nn.Linear(12, DIM), [64], spec, backend="tape")
        pixels = torch.randint(256, (40, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        colours = (pixels.view(40, 3, 4) / 255 - torch.tensor([0.2, 0.4, 0.6])[:, None]) / torch.tensor(
            [0.5, 0.25, 0.125]
        )[:, None]
        expected = encoder.module(colours.flatten(1)).detach()
        assert relative(encoder(pixels, lengths=[40]), expected) < 1e-5
        assert relative(encoder.eager(pixels, lengths=[40]), expected) < 1e-5
        twice = pixels.repeat(2, 1)  # more than the budget
        assert relative(encoder(twice, lengths=[80]), expected.repeat(2, 1)) < 1e-5
        encoder.module.register_forward_hook(lambda *args: None)
        assert relative(encoder(pixels, lengths=[40]), expected) < 1e-5
        assert set(encoder.stats.eager) == {"larger than every budget", "forward hooks"}


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6 * 6, DIM)

    def forward(self, x, positions):
        return x + positions


class Test13OneResamplingInThePlaceOfAnother:
    @pytest.mark.parametrize("align_corners", [False, True])
    @pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
    def test_the_table_is_resampled_as_it_is_declared(self, mode, align_corners):
        positions = vg.buffers.Interpolation("positions", table="table.weight", mode=mode, align_corners=align_corners)
        spec = vg.BufferSpec("x", vg.layouts.GridHW("sizes"), [positions])
        encoder = vg.GraphedEncoder(Embedded(), [256], spec, backend="tape")
        sizes = [(9, 4), (6, 6), (3, 13)]
        square = encoder.module.table.weight.detach().T.view(1, DIM, 6, 6)
        expected = [F.interpolate(square, size=size, mode=mode, align_corners=align_corners) for size in sizes]
        expected = torch.cat([one.flatten(2)[0].T for one in expected])
        got = encoder(torch.zeros(len(expected), DIM), sizes=sizes)
        assert relative(got, expected) < 1e-5
        other = F.interpolate(square, size=(9, 4), mode={"bilinear": "bicubic", "bicubic": "bilinear"}[mode])
        assert relative(got[:36], other.flatten(2)[0].T) > 0.01


class Timed(nn.Module):
    def forward(self, x, time, cu_clips, max_clip):
        return vg.buffers.add_sincos(x, time) + MeanOfSegment()(x, cu_clips, max_clip)


class Test14ResamplersAndTheirTimes:
    def test_minus_one_is_no_time_and_zero_is_one_and_frames_of_a_clip_are_one_segment(self):
        frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
        layout = vg.layouts.GridHW("sizes", columns=(vg.layouts.NestedColumn("times", pad=-1, default=-1),))
        buffers = [
            vg.buffers.SinCosColumn("time", "times", frequencies),
            vg.buffers.CuSeqlens("cu_clips", per="group"),
            vg.buffers.MaxSeqlen("max_clip", per="group"),
        ]
        encoder = vg.GraphedEncoder(
            Timed(), [vg.budgets.Budget(64, items=8)], vg.BufferSpec("x", layout, buffers), backend="tape"
        )
        sizes, times = [(2, 2), (2, 3), (2, 2), (1, 4)], [-1, 0, 3, 0]
        rows = rows_for([4, 6, 4, 4])
        got = encoder(rows, sizes=sizes, times=[[-1], [0, 3], [0]])
        clips = torch.cat([part.mean(0).expand(len(part), DIM) for part in rows.split([4, 10, 4])])
        angles = torch.tensor(times)[:, None] * frequencies
        embedded = torch.cat([angles.sin(), angles.cos()], 1) * (torch.tensor(times) >= 0)[:, None]
        expected = 2 * rows + clips + embedded.repeat_interleave(torch.tensor([4, 6, 4, 4]), 0)
        assert relative(got, expected) < 1e-5
        plain = encoder(rows[:4], sizes=sizes[:1])
        assert relative(plain, 2 * rows[:4] + rows[:4].mean(0)) < 1e-5
