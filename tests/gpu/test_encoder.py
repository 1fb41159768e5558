"""The padding contract on real CUDA graphs, and what only a GPU can show."""

import gc
import threading
from functools import partial

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import Attention, attention_spec, load_example
from tests.support.gpu import on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.threads import run_in_threads
from tests.support.towers import distance, equal_bits, original_of
from varlen_graphs.attention.transformers import use_attention

pytestmark = on_gpus()

HALF = [torch.bfloat16, torch.float16]
SEEDS = 8
CUBLAS = 40 << 20
"""What torch may keep for cuBLAS on a stream."""
LIMIT = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
BUDGETS = [
    vg.budgets.Budget(512, items=8, segments=40),
    vg.budgets.Budget(1024, items=8, segments=64),
    vg.budgets.Budget(2048),
]
LAYOUTS = [
    [(1, 32, 64)],  # an item of exactly the largest budget
    [(1, 2, 2)],
    [(1, 14, 14), (1, 8, 20)],
    [(8, 14, 14)],  # a video
    [(4, 10, 10), (1, 14, 14), (2, 2, 2)],  # both in one call
    [(1, 16, 32)],  # an item of exactly the smallest budget
    [(40, 2, 2)],  # more frames than items, and all segments of the smallest budget
    [(1, 24, 40), (1, 20, 20), (3, 16, 12)],
]


@pytest.fixture(scope="module", params=HALF, ids=str)
def half(request):
    tower = tower_on_gpu(dtype=torch.float32).to(request.param)
    return request.param, tower, vg.recipes.qwen3_vl(tower, BUDGETS)


def test_the_padding_contract_holds_in_half_precision(half):
    dtype, tower, encoder = half
    tower.rotary_pos_emb.float()  # .to(dtype) cast the frequencies; the original computes them in float32
    check_padding_contract(
        encoder, original_of(tower), partial(pixels_on_gpu, dtype=dtype), "grid_thw", LAYOUTS, LIMIT[dtype]
    )


def test_the_padding_contract_holds_in_float32():
    tower = tower_on_gpu(dtype=torch.float32)
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # the original embeds patches by a convolution
        check_padding_contract(
            encoder, original_of(tower), partial(pixels_on_gpu, dtype=torch.float32), "grid_thw", LAYOUTS, 1e-5
        )


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_is_no_worse_than_that_of_the_original_with_the_same_attention(dtype):
    eager, graphed = [], []
    for seed in range(SEEDS):
        tower = tower_on_gpu(seed, torch.float32).to(dtype)
        tower.rotary_pos_emb.float()
        exact = tower_on_gpu(seed, torch.float32).to(dtype).float()
        exact.rotary_pos_emb.inv_freq.copy_(tower.rotary_pos_emb.inv_freq)
        grid = LAYOUTS[4]
        rows = pixels_on_gpu(grid, seed, dtype)
        expected = original_of(exact)(rows.float(), grid)
        with use_attention(tower):
            eager.append(distance(original_of(tower)(rows, grid), expected))
        graphed.append(distance(vg.recipes.qwen3_vl(tower, BUDGETS[:2])(rows, grid_thw=grid), expected))
    assert sum(graphed) <= 1.1 * sum(eager)
    assert max(graphed) <= LIMIT[dtype]


def test_weights_may_change_in_place(half):
    dtype, tower, encoder = half
    rows = pixels_on_gpu(LAYOUTS[2], dtype=dtype)
    before = encoder(rows, grid_thw=LAYOUTS[2])
    with torch.no_grad():
        tower.merger.linear_fc2.weight.neg_()
        tower.merger.linear_fc2.bias.neg_()
    after = encoder(rows, grid_thw=LAYOUTS[2])
    assert torch.equal(after.pooler_output, -before.pooler_output)
    with torch.no_grad():
        tower.merger.linear_fc2.weight.neg_()
        tower.merger.linear_fc2.bias.neg_()
    assert equal_bits(encoder(rows, grid_thw=LAYOUTS[2]), before)


def test_an_image_in_a_graph_captured_for_a_video_is_alone(half):
    dtype, tower, _ = half
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(2048, items=2, segments=128)])
    video, image = [(16, 10, 10)], [(1, 14, 14)]
    encoder(pixels_on_gpu(video, dtype=dtype), grid_thw=video)
    rows = pixels_on_gpu(image, dtype=dtype)
    assert distance(encoder(rows, grid_thw=image), original_of(tower)(rows, image)) <= LIMIT[dtype]


def test_a_call_split_over_replays_keeps_its_order(half):
    dtype, tower, encoder = half
    grid = [(1, 30, 30), (6, 12, 12), (1, 40, 50), (1, 2, 2), (1, 60, 60), (9, 4, 4), (1, 20, 10)]
    rows = pixels_on_gpu(grid, dtype=dtype)
    before = encoder.stats.replays.total()
    assert distance(encoder(rows, grid_thw=grid), original_of(tower)(rows, grid)) <= LIMIT[dtype]
    assert encoder.stats.replays.total() - before > 1
    assert encoder.stats.eager.pop("larger than every budget") == 1


def test_a_grid_on_the_gpu_is_as_good_as_one_on_the_host(half):
    dtype, _, encoder = half
    rows = pixels_on_gpu(LAYOUTS[4], dtype=dtype)
    expected = encoder(rows, grid_thw=LAYOUTS[4])
    assert equal_bits(encoder(rows, grid_thw=torch.tensor(LAYOUTS[4], device="cuda")), expected)
    assert equal_bits(encoder(rows.float(), grid_thw=LAYOUTS[4]), expected)


def test_rows_on_the_host_are_refused(half):
    dtype, _, encoder = half
    with pytest.raises(vg.errors.InputError, match="hidden_states is on cpu, the module on cuda:0; move it first"):
        encoder(pixels_on_gpu(LAYOUTS[1], dtype=dtype).cpu(), grid_thw=LAYOUTS[1])


def test_calls_on_several_streams_and_threads_are_right(half):
    dtype, _, encoder = half
    grids = LAYOUTS[1:6]
    rows = [pixels_on_gpu(grid, seed, dtype) for seed, grid in enumerate(grids)]
    expected = [encoder(r, grid_thw=g) for r, g in zip(rows, grids, strict=True)]
    torch.cuda.synchronize()
    wrong = []

    def work(offset):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(30):
                at = (i + offset) % len(grids)
                got = encoder(rows[at], grid_thw=grids[at])
                torch.cuda.current_stream().synchronize()
                if not equal_bits(got, expected[at]):
                    wrong.append(at)

    run_in_threads(work)
    assert not wrong


def test_encoders_of_one_pool_do_not_disturb_each_other(half):
    dtype, tower, _ = half
    pool = vg.options.Pool()
    one, two = (vg.recipes.qwen3_vl(tower, BUDGETS[:2], pool=pool) for _ in range(2))
    rows = pixels_on_gpu(LAYOUTS[4], dtype=dtype)
    first = one(rows, grid_thw=LAYOUTS[4])
    two(pixels_on_gpu(LAYOUTS[2], 1, dtype=dtype), grid_thw=LAYOUTS[2])
    assert equal_bits(one(rows, grid_thw=LAYOUTS[4]), first)
    one.release()
    assert equal_bits(two(rows, grid_thw=LAYOUTS[4]), first)


def test_release_gives_the_memory_back():
    tower = tower_on_gpu(dtype=torch.float32).to(torch.bfloat16)
    encoder = vg.recipes.qwen3_vl(tower, [4096, 8192]).capture()
    encoder.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    encoder.capture()
    assert torch.cuda.memory_reserved() > before
    encoder.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + CUBLAS
    encoder.capture()
    rows = pixels_on_gpu(LAYOUTS[4])
    assert distance(encoder(rows, grid_thw=LAYOUTS[4]), original_of(tower)(rows, LAYOUTS[4])) <= 3e-2


def test_moved_weights_raise():
    tower = tower_on_gpu(dtype=torch.float32).to(torch.bfloat16)
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS[:1])
    rows = pixels_on_gpu(LAYOUTS[2])
    encoder(rows, grid_thw=LAYOUTS[2])
    tower.float()
    with pytest.raises(vg.errors.StaleGraphError, match="was moved or replaced since the graphs were captured"):
        encoder(rows, grid_thw=LAYOUTS[2])
    encoder.release()
    assert encoder(rows, grid_thw=LAYOUTS[2]).last_hidden_state.dtype == torch.float32


class Scaled(Attention):
    """An attention whose scale comes out of something a capture may not do."""

    def __init__(self, scale):
        super().__init__(16)
        self.scale = scale

    def forward(self, x, cu_seqlens, max_seqlen, times=1):
        return super().forward(x, cu_seqlens, max_seqlen) * self.scale(cu_seqlens) * times


def scaled(scale, **options):
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(16,)))
    return vg.GraphedEncoder(Scaled(scale).to("cuda", torch.bfloat16), [128], spec, **options)


def ask_the_stream(cu_seqlens):
    torch.cuda.current_stream().synchronize()  # no operator that could be watched: CUDA refuses it, and ends the capture
    return 1


def test_what_a_graph_cannot_hold_is_named_before_anything_is_captured():
    rows = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    encoder = scaled(lambda cu_seqlens: cu_seqlens.max().item())
    for _ in range(2):
        with pytest.raises(
            vg.errors.CaptureError, match=r"(?s)Tensor.item reads a tensor on the host.*test_encoder.py.*\.item\(\)"
        ):
            encoder(rows, lengths=[6])
    for scale in (
        lambda cu_seqlens: cu_seqlens.cpu()[-1].to("cuda"),
        lambda cu_seqlens: cu_seqlens[cu_seqlens > 0].sum(),
    ):
        with pytest.raises(vg.errors.CaptureError, match=r"could not be captured: .*\n  at .*test_encoder.py"):
            scaled(scale)(rows, lengths=[6])
    assert encoder.eager(rows, lengths=[6]).isfinite().all()


def test_numbers_written_on_the_host_become_constants_of_the_graph():
    rows = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    for scale in (
        lambda cu_seqlens: torch.tensor([2.0], device="cuda"),
        lambda cu_seqlens: torch.tensor([2.0]).to("cuda"),
    ):
        encoder = scaled(scale)
        torch.testing.assert_close(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6]))
        assert encoder.stats.replays


def test_the_end_of_an_encoder_leaves_a_capture_of_the_caller_alone():
    rows = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    encoder = scaled(lambda cu_seqlens: 1)
    encoder(rows, lengths=[6])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = rows * 2
        del encoder
        gc.collect()
        doubled += 1
    graph.replay()
    assert torch.equal(doubled, rows * 2 + 1)


def test_a_capture_that_cuda_ends_leaves_pool_allocator_and_random_numbers_working():
    rows = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    good = scaled(lambda cu_seqlens: 1)
    before = good(rows, lengths=[6])
    bad = scaled(ask_the_stream, pool=good.pool)
    kept = []
    for _ in range(2):
        with pytest.raises(
            vg.errors.CaptureError, match=r"(?s)not permitted.*test_encoder.py.*in ask_the_stream: .*no \.item"
        ) as error:
            bad(rows, lengths=[6])
        kept.append(error)  # its traceback holds the graph
    assert torch.randn(4, device="cuda").isfinite().all()
    assert torch.equal(good(rows, lengths=[6]), before)
    twice = good(rows, lengths=[6], times=2)  # a new capture in the same pool
    torch.testing.assert_close(twice, 2 * before)
    assert bad.eager(rows, lengths=[6]).isfinite().all()
    good.release()
    del kept, error
    assert torch.equal(good(rows, lengths=[6]), before)


def test_an_encoder_inside_of_a_captured_module_is_refused_by_name():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, lengths):
            return self.inner(x, lengths=lengths)

    inner = scaled(lambda cu_seqlens: 1)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(16,)), vg.Lengths())
    outer = vg.GraphedEncoder(Outer(inner), [128], spec)
    rows = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    before = inner(rows, lengths=[6])
    for _ in range(2):
        with pytest.raises(
            vg.errors.CaptureError, match="encoder of Scaled was called inside of Outer, which another encoder is"
        ):
            outer(rows, lengths=[6])
    assert torch.equal(inner(rows, lengths=[6]), before)


def test_other_threads_may_use_the_gpu_during_a_capture(half):
    _, tower, _ = half
    stop, failures, rounds = threading.Event(), [], []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    pinned = torch.randn(1000).pin_memory()
                    x = pinned.to("cuda", non_blocking=True)
                    x = torch.cat([x @ x.new_ones(1000, 50), x.new_empty(1 << 16)])
                    torch.cuda.current_stream().synchronize()
                    rounds.append(x[0].item())
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            vg.recipes.qwen3_vl(tower, BUDGETS).capture()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(rounds) > 2


def test_the_example_keeps_the_contract_on_the_gpu():
    example = load_example("text_encoder")
    torch.manual_seed(0)
    module = example.TextEncoder(depth=2).to("cuda", torch.bfloat16).eval()
    encoder = example.graph(module)

    def ids(lengths, seed=0):
        return torch.randint(1000, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).to("cuda")

    def eager(rows, lengths):
        return encoder.eager(rows, lengths=lengths)

    encoder(ids([5]), lengths=[5])
    check_padding_contract(encoder, eager, ids, "lengths", [[512] * 4, [1], [100, 3, 400], [16] * 32], 3e-2)


def test_compiled_code_is_captured_and_keeps_the_padding_contract():
    tower = tower_on_gpu(dtype=torch.float32).to(torch.bfloat16)
    tower.rotary_pos_emb.float()
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS, capture=vg.options.Capture(compile=True))
    original, rows = original_of(tower), pixels_on_gpu
    check_padding_contract(encoder, original, rows, "grid_thw", LAYOUTS, LIMIT[torch.bfloat16])
    assert "torch.compile took of that" in encoder.report()


def test_budgets_are_timed_and_reported(half):
    _, _, encoder = half
    encoder.capture()
    text = encoder.report(detail=True)
    assert "budgets timed in" in text
    assert "an eager call takes at least" in text
    costs = encoder.costs
    assert costs.budgets[-1] == max(BUDGETS)  # nothing replaces the largest
    assert all(0 < ms < 1e3 for ms in costs.replays.values())
