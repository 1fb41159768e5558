"""Attention on the GPU: every backend against a float64 reference, and what each promises about padding."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import TWO_GPUS, on_gpus
from tests.support.segments import (
    between_garbage,
    boundaries,
    heads_first,
    naive_attention,
    random_bias,
    relative,
    unaligned,
)
from varlen_graphs.attention.tile_schedule import op as schedule_op
from varlen_graphs.attention.tile_schedule import reference as schedule_reference
from varlen_graphs.attention.timing import measuring

pytestmark = on_gpus()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 4e-6}
EDGES = [1, 0, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 0, 127, 128, 129, 130, 300]
HEAD_DIMS = [32, 40, 64, 72, 80, 96, 112, 128]
KERNELS = [
    *[(BF16, head_dim, block) for head_dim in HEAD_DIMS for block in (64, 128)],
    *[(BF16, head_dim, 64) for head_dim in (192, 256)],
    *[(FP16, head_dim, 64) for head_dim in (64, 72, 88, 128, 256)],
    *[(BF16, head_dim, block) for head_dim in (88, 104) for block in (64, 128)],
    *[(FP32, head_dim, 64) for head_dim in (*HEAD_DIMS, 192, 256)],
    *[(FP32, head_dim, 128) for head_dim in (72, 128)],
]
"""What is tested at all edges; each is compiled for itself, so there are not more."""


def packed(rows, head_dim, dtype, heads=2):
    """Queries, keys and values as views of one projection: their strides do not depend on the rows."""
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn(rows, 3, heads, head_dim, device="cuda", generator=generator).to(dtype)


def schedule_of(cu_seqlens, rows, block, cu_seqlens_k=None):
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    tiles = schedule_op.tile_schedule(cu_seqlens, cu_seqlens_k, rows, block, 512)
    return vg.attention.TileSchedule(tiles, block, None, 0, rows, cu_seqlens, cu_seqlens_k)


def attend(q, k, v, cu_seqlens, block=64, **options):
    schedule = schedule_of(cu_seqlens, q.shape[0], block, options.get("cu_seqlens_k"))
    return vg.varlen_attention(q, k, v, cu_seqlens, q.shape[0], schedule=schedule, backend="triton", **options)


@pytest.mark.parametrize(("dtype", "head_dim", "block"), KERNELS, ids=str)
def test_the_kernel_at_all_edges_and_under_all_paddings(dtype, head_dim, block):
    for lengths in (EDGES, [1], [0]):
        active = sum(lengths)
        qkv = packed(active + 100, head_dim, dtype)
        out = attend(*qkv.unbind(1), boundaries(lengths, device="cuda"), block)
        expected = naive_attention(*qkv.unbind(1), lengths, lengths, head_dim**-0.5)
        assert relative(out, expected) <= TOLERANCE[dtype]
        assert not out[active:].any()
        for bad in (torch.nan, torch.inf):
            qkv[active:] = bad
            for empty in (0, 3, 256):
                assert torch.equal(attend(*qkv.unbind(1), boundaries(lengths, empty, "cuda"), block), out)
        if active > 1:
            qkv[active - 1, 2, 0, 0] = torch.nan  # a value of the last segment
            dirty = attend(*qkv.unbind(1), boundaries(lengths, device="cuda"), block)
            assert torch.equal(dirty[: active - lengths[-1]], out[: active - lengths[-1]])
            assert dirty[active - lengths[-1] : active, 0, 0].isnan().all()


WINDOWS = [(-1, 0), (40, 0), (100, -1), (-1, 70), (0, 0)]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block", "window"),
    [
        *[(BF16, 72, 64, window) for window in WINDOWS],
        *[(BF16, 64, 64, window) for window in WINDOWS[:4]],
        *[(BF16, 128, 128, window) for window in WINDOWS[:2]],
        (FP16, 64, 128, (40, 30)),
        (FP32, 80, 64, (40, 30)),
    ],
    ids=str,
)
def test_windows_keys_of_other_lengths_and_several_query_heads(dtype, head_dim, block, window):
    lengths, lengths_k = [1, 200, 64, 0, 65, 130, 300, 40], [130, 65, 0, 9, 64, 130, 200, 500]
    q = torch.randn(sum(lengths) + 20, 4, head_dim, device="cuda").to(dtype)
    k, v = torch.randn(2, sum(lengths_k) + 30, 2, head_dim, device="cuda").to(dtype).unbind(0)
    for x, active in ((q, sum(lengths)), (k, sum(lengths_k)), (v, sum(lengths_k))):
        x[active:] = torch.nan
    cu_seqlens, cu_seqlens_k = (boundaries(x, 5, "cuda") for x in (lengths, lengths_k))
    out = attend(q, k, v, cu_seqlens, block, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=500, window=window)
    expected = naive_attention(q, k, v, lengths, lengths_k, head_dim**-0.5, *window)
    assert relative(out, expected) <= TOLERANCE[dtype]
    assert not out[sum(lengths) :].any()
    if window == (-1, 0):
        causal = vg.varlen_attention(
            q, k, v, cu_seqlens, 300, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=500, causal=True,
            schedule=schedule_of(cu_seqlens, len(q), block, cu_seqlens_k),
        )  # fmt: skip
        assert torch.equal(causal, out)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block", "window", "reach", "kept"),
    [
        (BF16, 64, 64, (-1, -1), 128, BF16),
        (BF16, 64, 64, (-1, 0), 128, FP32),
        (FP16, 72, 64, (40, 30), 20, FP16),
        (BF16, 128, 128, (-1, -1), 500, BF16),
        (FP32, 64, 64, (100, -1), 0, FP32),
    ],
    ids=str,
)
def test_biases_within_their_reach_and_beyond(dtype, head_dim, block, window, reach, kept):
    qkv = packed(sum(EDGES) + 100, head_dim, dtype)
    bias = random_bias(2, reach, kept, "cuda")
    cu_seqlens = boundaries(EDGES, 5, "cuda")
    expected = naive_attention(*qkv.unbind(1), EDGES, EDGES, head_dim**-0.5, *window, bias)
    qkv[sum(EDGES) :] = torch.nan
    out = attend(*qkv.unbind(1), cu_seqlens, block, window=window, bias=bias)
    assert relative(out, expected) <= TOLERANCE[dtype]
    assert not out[sum(EDGES) :].any()
    assert (
        torch.equal(vg.varlen_attention(*qkv.unbind(1), cu_seqlens, 300, window=window, bias=bias), out) or block > 64
    )
    with pytest.raises(vg.errors.InputError, match="'torch' got a bias: expected none"):
        vg.varlen_attention(*qkv.unbind(1), cu_seqlens, 300, bias=bias, backend="torch")


def channels_apart(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", [heads_first, between_garbage, unaligned, channels_apart])
def test_layouts_are_read_where_they_lie_and_nothing_beside_them(layout):
    lengths = [200, 130]
    q, k, v = packed(330, 72, BF16).unbind(1)
    out = attend(layout(q), layout(k), layout(v), boundaries(lengths, device="cuda"))
    assert relative(out, naive_attention(q, k, v, lengths, lengths, 72**-0.5)) <= TOLERANCE[BF16]


@pytest.mark.parametrize(("rows", "rows_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_and_no_keys(rows, rows_k):
    q, k, v = (torch.randn(n, 2, 64, device="cuda", dtype=BF16) for n in (rows, rows_k, rows_k))
    cu_seqlens, cu_seqlens_k = boundaries([rows], device="cuda"), boundaries([rows_k], device="cuda")
    for backend in ("triton", "reference"):
        options = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": 5, "backend": backend}
        out = vg.varlen_attention(q, k, v, cu_seqlens, 5, **options)
        assert out.shape == q.shape
        assert not out.any()


@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 72), (BF16, 128), (FP32, 72)], ids=str)
def test_one_segment_of_16384_rows(dtype, head_dim):
    qkv = packed(16_384, head_dim, dtype)
    q, k, v = qkv.unbind(1)
    for lengths in ([16_384], [16_383]):
        cu_seqlens = boundaries(lengths, 255, "cuda")
        out = vg.varlen_attention(q, k, v, cu_seqlens, 16_384, backend="triton")
        some = torch.arange(0, lengths[0], 97, device="cuda")
        keys, values = (x[: lengths[0]].double().transpose(0, 1) for x in (k, v))
        scores = q[some].double().transpose(0, 1) @ keys.transpose(1, 2) * head_dim**-0.5
        assert relative(out[some], (scores.softmax(-1) @ values).transpose(0, 1)) <= TOLERANCE[dtype]
        assert not out[lengths[0] :].any()
        qkv[16_383:] = torch.nan


@pytest.mark.parametrize("block", [64, 128])
def test_the_schedule_equals_the_reference(block):
    for lengths, empty, rows in ((EDGES, 0, 1500), (EDGES, 256, 1252), ([3] * 2000 + [7000], 31, 16_384), ([0], 1, 1)):
        cu_seqlens = boundaries(lengths, empty, "cuda")
        got = schedule_op.tile_schedule(cu_seqlens, cu_seqlens, rows, block, 128)
        expected = schedule_reference.tile_schedule(cu_seqlens, cu_seqlens, rows, block, 128)
        count = 1 + int(expected[0, 0])
        assert got.shape == expected.shape
        assert torch.equal(got[:count], expected[:count])


def test_a_graph_follows_the_segments_that_are_there():
    qkv, cu_seqlens = packed(1300, 72, BF16), boundaries([1300], 63, "cuda")

    def run():
        schedule = vg.attention.tile_schedule(cu_seqlens, 1300, rows=1300, heads=2, head_dim=72)
        return vg.varlen_attention(*qkv.unbind(1), cu_seqlens, 1300, schedule=schedule, backend="triton")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in (EDGES, [1], [1300], [200, 0, 700]):
        cu_seqlens.copy_(boundaries(lengths, 64 - len(lengths), "cuda"))
        clean = packed(1300, 72, BF16)
        qkv.copy_(clean)
        qkv[sum(lengths) :] = torch.nan
        out.fill_(torch.nan)
        graph.replay()
        expected = naive_attention(*clean.unbind(1), lengths, lengths, 72**-0.5)
        assert relative(out, expected) <= TOLERANCE[BF16]


def test_more_elements_than_32_bits_count():
    rows, last = 2**31 // (2 * 128) + 200, 150
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    q, k, v = (torch.zeros(rows, 2, 128, device="cuda", dtype=BF16) for _ in range(3))
    for x in (q, k, v):
        x[-last:] = torch.randn(last, 2, 128, device="cuda")
    cu_seqlens = torch.tensor([0, rows - last, rows], dtype=torch.int32, device="cuda")
    # The long segment has one key: with all of its own it would take minutes.
    cu_seqlens_k = torch.tensor([rows - last - 1, rows - last, rows], dtype=torch.int32, device="cuda")
    out = attend(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=last)
    tail = [x[-last:] for x in (q, k, v)]
    assert relative(out[-last:], naive_attention(*tail, [last], [last], 128**-0.5)) <= TOLERANCE[BF16]


@TWO_GPUS
def test_tensors_on_another_device_than_the_current_one():
    q, k, v = packed(200, 72, BF16).to("cuda:1").unbind(1)
    expected = naive_attention(q, k, v, [200], [200], 72**-0.5)
    with torch.cuda.device(0):
        for backend in ("triton", "torch", "auto"):
            with measuring():
                out = vg.varlen_attention(q, k, v, boundaries([200], device="cuda:1"), 200, backend=backend)
            torch.cuda.synchronize(1)
            assert relative(out, expected) <= TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_other_backends_read_no_padding(dtype, head_dim):
    lengths = [1, 0, 130, 64, 0, 33, 300]
    active, cu_seqlens = sum(lengths), boundaries(lengths, 3, "cuda")
    qkv = packed(active + 100, head_dim, dtype)
    for window in ((-1, -1), (-1, 0), (20, 30)):
        expected = naive_attention(*qkv.nan_to_num().unbind(1), lengths, lengths, head_dim**-0.5, *window)
        for backend in ("torch", "reference"):
            runs = []
            for padding in (1.0, torch.nan, torch.inf):
                qkv[active:] = padding
                runs.append(vg.varlen_attention(*qkv.unbind(1), cu_seqlens, 300, window=window, backend=backend))
            assert relative(runs[0][:active], expected[:active]) <= TOLERANCE[dtype]
            assert all(torch.equal(run[:active], runs[0][:active]) for run in runs)
            assert backend == "torch" or not any(run[active:].any() for run in runs)


def test_auto_takes_what_was_measured_and_never_syncs_outside():
    lengths = [300, 33]
    q, k, v = packed(400, 72, BF16).unbind(1)
    cu_seqlens = boundaries(lengths, device="cuda")
    before = vg.varlen_attention(q, k, v, cu_seqlens, 300)
    assert torch.equal(before, vg.varlen_attention(q, k, v, cu_seqlens, 300, backend="triton"))
    with measuring():
        measured = vg.varlen_attention(q, k, v, cu_seqlens, 300)
    assert relative(measured[:333], naive_attention(q, k, v, lengths, lengths, 72**-0.5)[:333]) <= TOLERANCE[BF16]
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = vg.varlen_attention(q, k, v, cu_seqlens, 300)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(after[:333], measured[:333])


def test_auto_takes_the_reference_where_no_kernel_can():
    q, k, v = packed(40, 24, torch.float64).unbind(1)
    out = vg.varlen_attention(q, k, v, boundaries([30], device="cuda"), 30)
    torch.testing.assert_close(out, naive_attention(q, k, v, [30], [30], 24**-0.5))


def test_boundaries_on_the_host_are_refused():
    q, k, v = packed(40, 64, BF16).unbind(1)
    with pytest.raises(
        vg.errors.InputError, match=r"cu_seqlens is torch.int32 \[2\] on cpu: expected int32 .* on cuda:0"
    ):
        vg.varlen_attention(q, k, v, boundaries([40]), 40)
