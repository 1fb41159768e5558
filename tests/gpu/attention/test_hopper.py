"""The kernel for long segments on Hopper GPUs, alone and together with the other one."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.gpu.attention.test_api import BF16, FP16, TOLERANCE, packed
from tests.support.gpu import on_gpus
from tests.support.segments import between_garbage, boundaries, heads_first, naive_attention, relative, unaligned
from varlen_graphs.attention.hopper import launch, reference
from varlen_graphs.attention.hopper.config import HEAD_DIMS, long_keys
from varlen_graphs.attention.tile_schedule import op as schedule_op
from varlen_graphs.attention.timing import measuring, results

pytestmark = [
    *on_gpus(),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

EDGES = [1, 600, 0, 175, 176, 177, 999, 1000, 1001, 111, 112, 113, 2 * 176, 1025, 1]
CASES = [
    *[(BF16, head_dim, 128) for head_dim in HEAD_DIMS],
    *[(BF16, head_dim, 192) for head_dim in HEAD_DIMS if head_dim <= 96],
    *[(FP16, head_dim, 128) for head_dim in (64, 72, 128)],
    (FP16, 72, 192),
    (BF16, 64, 256),
    (FP16, 64, 256),
]


def attend(q, k, v, cu_seqlens, longest=1025):
    return vg.varlen_attention(q, k, v, cu_seqlens, longest, backend="hopper")


@pytest.mark.parametrize(("dtype", "head_dim", "block"), CASES, ids=str)
def test_the_kernel_equals_its_reference_at_all_edges(dtype, head_dim, block):
    # Heads in pairs, and an odd number of them; tiles that are left over, which programs take in parts.
    for heads, lengths in ((2, EDGES), (3, [7]), (4, [1]), (1, [600, 2 * block - 1]), (2, [600, block + 65])):
        active = sum(lengths)
        qkv = packed(active + 300, head_dim, dtype, heads)
        cu_seqlens, runs = boundaries(lengths, 3, "cuda"), []
        tiles = schedule_op.tile_schedule(cu_seqlens, cu_seqlens, len(qkv), block, 1)
        expected = reference.attention(*qkv.double().unbind(1), tiles, block, head_dim**-0.5)
        for padding, programs in (
            (1.0, None),
            (torch.nan, None),
            (-torch.inf, 7),
            *((1.0, few) for few in range(3, 11)),
        ):
            qkv[active:] = padding
            runs.append(launch.attention(*qkv.unbind(1), tiles, block, head_dim**-0.5, programs)[:active])
        assert relative(runs[0], expected[:active]) <= TOLERANCE[dtype]
        assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (BF16, 72), (FP16, 80), (BF16, 128)], ids=str)
def test_long_and_short_segments_under_all_paddings(dtype, head_dim):
    least = long_keys(head_dim)
    for lengths in (EDGES, [least], [least - 1]):
        active, cu_seqlens = sum(lengths), boundaries(lengths, 5, "cuda")
        qkv, runs = packed(active + 100, head_dim, dtype), []
        expected = naive_attention(*qkv.unbind(1), lengths, lengths, head_dim**-0.5)
        for padding in (1.0, torch.nan, torch.inf):
            qkv[active:] = padding
            runs.append(attend(*qkv.unbind(1), cu_seqlens))
        assert relative(runs[0], expected) <= TOLERANCE[dtype]
        assert not runs[0][active:].any()
        assert all(torch.equal(run, runs[0]) for run in runs)


def test_values_that_are_not_finite_stay_in_their_segment():
    lengths = [1000, 1100, 1200]
    qkv = packed(3300, 72, BF16)
    clean = attend(*qkv.unbind(1), boundaries(lengths, device="cuda"), 1200)
    qkv[1000:2100] = torch.nan
    out = attend(*qkv.unbind(1), boundaries(lengths, device="cuda"), 1200)
    assert torch.equal(out[:1000], clean[:1000])
    assert torch.equal(out[2100:], clean[2100:])
    assert out[1000:2100].isnan().all()


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_several_query_heads_share_a_key_head(head_dim, heads_k):
    q = packed(2500, head_dim, BF16, 4)[:, 0]
    k, v = packed(2500, head_dim, BF16, heads_k)[:, 1:].unbind(1)
    out = attend(q, k, v, boundaries([1000, 1450], device="cuda"), 1450)
    assert relative(out, naive_attention(q, k, v, [1000, 1450], [1000, 1450], head_dim**-0.5)) <= TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("layout", [torch.clone, between_garbage])
def test_layouts_are_read_where_they_lie_and_nothing_beside_them(layout, head_dim):
    q, k, v = (layout(x) for x in packed(2300, head_dim, BF16).unbind(1))
    out = attend(q, k, v, boundaries([1000, 1250], device="cuda"), 1250)
    assert relative(out, naive_attention(q, k, v, [1000, 1250], [1000, 1250], head_dim**-0.5)) <= TOLERANCE[BF16]


def test_tensors_that_the_copy_engine_cannot_read_are_left_to_other_kernels():
    cu_seqlens = boundaries([1000, 1250], device="cuda")
    q, k, v = (heads_first(x) for x in packed(2300, 72, BF16).unbind(1))
    with pytest.raises(vg.errors.InputError, match="nor heads that lie rows apart"):
        attend(q, k, v, cu_seqlens, 1250)
    q, k, v = (unaligned(x) for x in packed(2300, 72, BF16).unbind(1))
    for backend in ("hopper", "torch"):
        with pytest.raises(vg.errors.InputError, match="heads or rows that begin at no multiple of 16 bytes"):
            vg.varlen_attention(q, k, v, cu_seqlens, 1250, backend=backend)
    with measuring():
        out = vg.varlen_attention(q, k, v, cu_seqlens, 1250)
    assert relative(out, naive_attention(q, k, v, [1000, 1250], [1000, 1250], 72**-0.5)) <= TOLERANCE[BF16]


def test_large_scores_and_none_at_all():
    q, k, v = (30 * packed(1200, 72, BF16)).unbind(1)
    cu_seqlens = boundaries([1200], device="cuda")
    assert relative(attend(q, k, v, cu_seqlens, 1200), naive_attention(q, k, v, [1200], [1200], 72**-0.5)) <= 0.01
    mean = v.float().mean(0, keepdim=True).expand(1200, -1, -1)
    assert relative(attend(q, torch.zeros_like(k), v, cu_seqlens, 1200), mean) <= TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("growth", [0.1, 3, 7.9, 8.1, 60])
def test_scores_that_grow_from_block_to_block(growth, head_dim):
    rows = 1500
    q, k, v = packed(rows, head_dim, FP16).unbind(1)
    k *= 0.1
    k[..., 0] = torch.linspace(0, growth * rows / 128, rows, device="cuda", dtype=torch.float64)[:, None].half()
    q[..., 0] = torch.linspace(-1, 1, rows, device="cuda").half()[:, None]  # backwards, not at all, and forwards
    out = vg.varlen_attention(q, k, v, boundaries([rows], device="cuda"), rows, scale=0.693147, backend="hopper")
    assert relative(out, naive_attention(q, k, v, [rows], [rows], 0.693147)) <= TOLERANCE[FP16]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("offset", [-300, -20, 20, 300])
def test_scores_far_from_zero(offset, head_dim):
    rows = 1500
    q, k, v = packed(rows, head_dim, FP16).unbind(1)
    q[..., 0], k[..., 0] = 16, offset / 16
    out = vg.varlen_attention(q, k, v, boundaries([rows], device="cuda"), rows, scale=0.5, backend="hopper")
    assert relative(out, naive_attention(q, k, v, [rows], [rows], 0.5)) <= TOLERANCE[FP16]


def test_bits_of_a_row_depend_on_its_own_scores_alone():
    rows = 1500
    q, k, v = packed(rows, 64, BF16).unbind(1)
    k[..., 0] = torch.linspace(0, 20, rows, device="cuda").bfloat16()[:, None]
    q[..., 0], cu_seqlens = 0, boundaries([rows], device="cuda")
    alone = attend(q, k, v, cu_seqlens, rows)
    q[::8, :, 0] = -30.0  # keys are taken from the last one on: these scores grow by much from block to block
    beside = attend(q, k, v, cu_seqlens, rows)
    others = torch.arange(rows, device="cuda") % 8 != 0
    assert torch.equal(alone[others], beside[others])
    assert not torch.equal(alone[::8], beside[::8])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_reaches_all_rows_of_its_segment(value):
    q, k, v = packed(2200, 64, BF16).abs().unbind(1)
    k[700] = value
    out = attend(q, k, v, boundaries([1100, 1100], device="cuda"), 1100)
    assert out[:1100].isnan().all()
    assert out[1100:].isfinite().all()


def test_a_graph_follows_the_segments_that_are_there():
    rows = 4700
    qkv, cu_seqlens = packed(rows, 72, BF16), boundaries([rows], 63, "cuda")

    def run():
        schedule = vg.attention.tile_schedule(cu_seqlens, rows, rows=rows, heads=2, head_dim=72)
        assert schedule.long_tiles is not None
        return vg.varlen_attention(*qkv.unbind(1), cu_seqlens, rows, schedule=schedule, backend="hopper")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in (EDGES[:-3], [1], [rows], [200, 0, 1700, 1000, 999]):
        cu_seqlens.copy_(boundaries(lengths, 64 - len(lengths), "cuda"))
        clean = packed(rows, 72, BF16)
        qkv.copy_(clean)
        qkv[sum(lengths) :] = torch.nan
        out.fill_(torch.nan)
        graph.replay()
        expected = naive_attention(*clean.unbind(1), lengths, lengths, 72**-0.5)
        assert relative(out, expected) <= TOLERANCE[BF16]


def test_a_schedule_without_long_tiles_is_completed():
    q, k, v = packed(1200, 72, BF16).unbind(1)
    cu_seqlens = boundaries([200, 300, 700], device="cuda")
    for head_dim in (48, 64, 72, 128):  # of each of which other segments are long
        short = vg.attention.tile_schedule(cu_seqlens, 100, rows=1200, heads=2, head_dim=head_dim)
        assert short.long_tiles is None
        out = vg.varlen_attention(q, k, v, cu_seqlens, 1200, schedule=short, backend="hopper")
        assert torch.equal(out, attend(q, k, v, cu_seqlens, 1200))


def test_captures_time_it_for_long_segments():
    q, k, v = packed(8192, 72, BF16, 16).unbind(1)
    cu_seqlens = boundaries([64] * 100, 28, "cuda")
    with measuring():
        vg.varlen_attention(q, k, v, cu_seqlens, 8192)
    assert any(key[2] == q.shape and "hopper" in key for key in results)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 2 * 72)

    def forward(self, x, cu_seqlens, max_seqlen):
        q, k, v = self.qkv(x).view(-1, 3, 2, 72).unbind(1)
        return vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


@pytest.mark.parametrize("by_calls", [False, True], ids=["capture", "calls"])
def test_every_graph_has_the_fastest_kernel_for_its_size(by_calls):
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(64,)), vg.Lengths(), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
    )
    sizes = [3072 + 64 * by_calls, 5120 + 64 * by_calls, 9216 + 64 * by_calls]  # of no other test
    encoder = vg.GraphedEncoder(Heads().cuda().to(BF16).eval(), sizes, spec)
    if by_calls:
        for rows in sizes:
            encoder(torch.randn(rows, 64, device="cuda", dtype=BF16), lengths=[rows])
    else:
        encoder.capture()
    timed = {key[2][0] for key in results if "hopper" in key and key[2][1:] == (2, 72)}
    assert timed.issuperset(sizes)


def test_more_elements_than_32_bits_count():
    length = 1000
    rows = (2**31 // (2 * 128) // length + 2) * length
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    q, k, v = (torch.zeros(rows, 2, 128, device="cuda", dtype=BF16) for _ in range(3))
    for x in (q, k, v):
        x[-length:] = torch.randn(length, 2, 128, device="cuda")
    cu_seqlens = (torch.arange(rows // length + 1, device="cuda") * length).int()
    out = attend(q, k, v, cu_seqlens, length)
    tail = [x[-length:] for x in (q, k, v)]
    assert relative(out[-length:], naive_attention(*tail, [length], [length], 128**-0.5)) <= TOLERANCE[BF16]
    assert not out[:-length].any()


@pytest.mark.parametrize("ends", [[2**31 - 1], [100, 1500], [-5, 1200], [1200, 3, 1200], [-(2**31), 1200]])
def test_boundaries_that_cannot_be_do_not_hang(ends):
    q, k, v = packed(1200, 72, BF16).unbind(1)
    attend(q, k, v, torch.tensor([0, *ends], dtype=torch.int32, device="cuda"), 1200)
    torch.cuda.synchronize()
    out = attend(q, k, v, boundaries([1200], device="cuda"), 1200)
    assert relative(out, naive_attention(q, k, v, [1200], [1200], 72**-0.5)) <= TOLERANCE[BF16]


def test_keys_whose_scores_are_minus_infinity_have_no_weight():
    q, k, v = packed(1200, 80, BF16).abs().unbind(1)
    k[1100:] = -torch.inf
    out = attend(q, k, v, boundaries([1200], device="cuda"), 1200)
    expected = naive_attention(q, k, v, [1200], [1200], 80**-0.5)
    assert relative(out, expected) <= TOLERANCE[BF16]


def test_a_kernel_that_is_not_there_is_refused_and_others_are_taken(monkeypatch):
    q, k, v = packed(1200, 120, FP16).unbind(1)  # no other test loads this kernel
    cu_seqlens = boundaries([1200], device="cuda")
    monkeypatch.setattr(launch, "binary", lambda chosen: b"no kernel")
    with pytest.raises(vg.errors.InputError, match="backend 'hopper' got a kernel that cannot be compiled or loaded"):
        attend(q, k, v, cu_seqlens, 1200)
    with measuring():
        out = vg.varlen_attention(q, k, v, cu_seqlens, 1200)
    assert relative(out, naive_attention(q, k, v, [1200], [1200], 120**-0.5)) <= TOLERANCE[FP16]
