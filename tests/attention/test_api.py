"""`varlen_attention` on the CPU: its references against a naive one, the schedule, and the public entry."""

import re
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.segments import boundaries, naive_attention, random_bias, random_qkv
from varlen_graphs.attention import backends, op
from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.kernel import reference
from varlen_graphs.attention.kernel.config import configuration, split, tile_rows
from varlen_graphs.attention.tile_schedule import op as schedule_op
from varlen_graphs.attention.tile_schedule import reference as schedule_reference

IMPLEMENTATIONS = [reference.by_segment, reference.dense]
HEADS = [(1, 1), (2, 2), (4, 2), (6, 1)]

windows = st.tuples(*[st.sampled_from([-1, -1, 0, 1, 3, 20])] * 2)
segments = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
reaches = st.none() | st.integers(0, 10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    segments=segments, same=st.booleans(), padding=st.integers(0, 5), heads=st.sampled_from(HEADS),
    scale=st.floats(0.1, 2), window=windows, reach=reaches,
)  # fmt: skip
def test_each_row_attends_to_the_keys_it_may_see_of_its_segment(
    implementation, segments, same, padding, heads, scale, window, reach
):
    lengths, lengths_k = zip(*segments, strict=True)
    lengths_k = lengths if same else lengths_k
    q, k, v = random_qkv(lengths, lengths_k, *heads, padding=padding)
    for x, count in ((q, sum(lengths)), (k, sum(lengths_k)), (v, sum(lengths_k))):
        x[count:] = torch.nan
    bias = random_bias(heads[0], reach)
    out = implementation(q, k, v, boundaries(lengths), boundaries(lengths_k), scale, *window, bias)
    expected = naive_attention(q, k, v, lengths, lengths_k, scale, *window, bias)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [None, 2])
def test_no_padding_and_no_other_segment_reaches_a_row(implementation, dtype, reach):
    cu_seqlens = boundaries([3, 0, 4], empty=2)

    def attend(tensors):
        return implementation(*tensors, cu_seqlens, cu_seqlens, 1.0, -1, -1, random_bias(2, reach))

    clean = random_qkv([3, 4], padding=3, dtype=dtype)
    expected = attend(clean)
    for bad in (torch.nan, torch.inf, -torch.inf):
        dirty = [x.clone() for x in clean]
        for x in dirty:
            x[7:] = bad
        assert torch.equal(attend(dirty), expected)
    dirty = [x.clone() for x in clean]
    dirty[2][1, 0, 0] = torch.nan  # a value of the first segment
    out = attend(dirty)
    assert torch.equal(out[3:], expected[3:])
    assert out[:3, 0].isnan().any(-1).all()


@given(st.integers(1, 40))
def test_queries_are_taken_in_blocks_without_a_difference(block):
    arguments = (
        *random_qkv([11, 20, 9]),
        boundaries([11, 20, 9]),
        boundaries([11, 20, 9]),
        0.3,
        5,
        -1,
        random_bias(2, 4),
    )
    expected = reference.by_segment(*arguments)
    before = reference.MAX_SCORES
    reference.MAX_SCORES = block * 40 * 2
    try:
        torch.testing.assert_close(reference.dense(*arguments), expected)
    finally:
        reference.MAX_SCORES = before


WRONG_BOUNDARIES = {
    "behind the rows": ([0, 4, 12], 8, "cu_seqlens goes from 0 to 12, but q has 10 rows: expected boundaries that"),
    "decreasing": ([0, 6, 4, 10], 8, "cu_seqlens[1:3] is [6, 4]: expected boundaries that never fall"),
    "decreasing below zero": ([0, -2, 10], 12, "cu_seqlens[0:2] is [0, -2]: expected boundaries that never fall"),
    "behind the rows, and back": ([0, 14, 10], 20, "cu_seqlens[1:3] is [14, 10]: expected boundaries that never fall"),
    "not from the first row on": ([2, 10], 8, "cu_seqlens goes from 2 to 10, but q has 10 rows"),
    "longer than promised": ([0, 2, 10], 7, "cu_seqlens[1:3] is [2, 10], a segment of 8 rows, but max_seqlen=7"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("values", "longest", "message"), WRONG_BOUNDARIES.values(), ids=WRONG_BOUNDARIES.keys())
def test_boundaries_on_the_host_that_are_none_are_refused(backend, values, longest, message):
    qkv, right = random_qkv([10]), boundaries([5, 5, *[0] * (len(values) - 3)] if len(values) > 2 else [10])
    wrong = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(vg.errors.InputError, match=re.escape(message)):
        vg.varlen_attention(*qkv, wrong, longest, backend=backend)
    of_keys = message.replace("cu_seqlens", "cu_seqlens_k").replace("q has", "k has").replace("_seqlen=", "_seqlen_k=")
    with pytest.raises(vg.errors.InputError, match=re.escape(of_keys)):
        vg.varlen_attention(*qkv, right, 10, cu_seqlens_k=wrong, max_seqlen_k=longest, backend=backend)


def test_dense_attention_reads_nothing_on_the_host():
    q, k, v = (x.to("meta") for x in random_qkv([40]))
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    bias = random_bias(2, 4, device="meta")
    assert reference.dense(q, k, v, cu_seqlens, cu_seqlens, 1.0, 3, 3, bias).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_arithmetic_is_at_least_float32(dtype):
    arguments = random_qkv([50], dtype=dtype)
    bias = random_bias(2, 9, dtype)
    expected = naive_attention(*arguments, [50], [50], 1.0, bias=bias)
    for implementation in IMPLEMENTATIONS:
        out = implementation(*arguments, boundaries([50]), boundaries([50]), 1.0, -1, -1, bias)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


schedules = st.tuples(
    segments | st.just([(300, 7), (0, 9), (129, 9)]),
    st.integers(0, 200),
    st.sampled_from([4, 64]),
    st.sampled_from([1, 7, 9, 500]),
)


@given(schedules)
def test_every_row_is_in_one_tile_and_the_longest_come_first(case):
    segments, padding, block, long = case
    lengths, lengths_k = zip(*segments, strict=True)
    rows, cu_q, cu_k = sum(lengths) + padding, boundaries(lengths).tolist(), boundaries(lengths_k).tolist()
    tiles = schedule_reference.tile_schedule(boundaries(lengths), boundaries(lengths_k), rows, block, long)
    assert tiles.dtype == torch.int32
    assert tiles.shape == (1 + schedule_reference.tile_bound(rows, len(lengths), block), 5)
    count = int(tiles[0, 0])
    assert count < len(tiles)
    own = {(cu_q[i], cu_q[i + 1], cu_k[i], cu_k[i + 1]) for i in range(len(lengths))}
    seen, keys = [], []
    for index, (start, stop, start_k, stop_k, first) in enumerate(tiles[1 : 1 + count].tolist()):
        if start < sum(lengths):
            assert (start, stop, start_k, stop_k) in own
            keys.append(stop_k - start_k)
        else:  # rows in no segment come last, without keys
            assert (start, stop) == (sum(lengths), rows)
            assert start_k == stop_k
            keys.append(-1)
        begin = start + (index - first) * block
        seen += range(begin, min(begin + block, stop))
    assert sorted(seen) == list(range(rows))
    assert keys == sorted(keys, reverse=True)
    assert tiles[0, 1] == sum(length >= long for length in keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dimension_has_a_configuration(head_dim, dtype):
    configs = [configuration(head_dim, block, dtype, biased) for biased in (False, True) for block in (64, 128)]
    assert all(config.keys % 16 == 0 for config in configs)
    if 16 in split(head_dim):
        assert configs[0].keys <= 64
    first, rest = split(head_dim)
    assert head_dim <= first + rest < 2 * max(16, head_dim)
    assert all(part & (part - 1) == 0 and (part >= 16 or part == 0) for part in (first, rest))


@given(st.integers(1, 256), st.integers(1, 32), st.integers(1, 9999), st.integers(0, 9999), st.integers(1, 9999))
def test_longer_segments_never_make_smaller_tiles(head_dim, heads, rows, more, longest):
    assert tile_rows(head_dim, heads, rows, longest) <= tile_rows(head_dim, heads, rows, longest + more)
    assert tile_rows(head_dim, heads, rows, min(longest, 64)) == 64


@pytest.mark.parametrize(
    ("head_dim", "rows", "longest", "expected"),
    [
        (72, 784, 784, 64),
        (72, 1764, 1764, 128),
        (72, 1764, 196, 64),
        (72, 3136, 3136, 64),
        (80, 1764, 1764, 128),
        (80, 7056, 7056, 64),
        (88, 784, 784, 64),
        (88, 1764, 196, 128),
        (96, 7056, 7056, 128),
        (128, 7056, 7056, 64),
    ],
)
def test_tiles_are_those_that_were_measured_to_be_faster(head_dim, rows, longest, expected):
    assert tile_rows(head_dim, 16, rows, longest) == expected


def test_the_operators_are_sound_for_the_compiler():
    q, k, v = random_qkv([3, 7], [5, 1], heads=4, heads_k=2, padding=2)
    cu_q, cu_k = boundaries([3, 7]), boundaries([5, 1])
    torch.library.opcheck(schedule_op.tile_schedule, (cu_q, cu_k, 12, 64, 5))
    tiles = schedule_op.tile_schedule(cu_q, cu_k, 12, 64, 5)
    for given_tiles in (None, tiles):
        torch.library.opcheck(op.attention, (q, k, v, cu_q, cu_k, given_tiles, 64, None, 0, 7, 5, 0.3, -1, 0, "auto"))
    packed = torch.randn(12, 3, 2, 8).unbind(1)
    torch.library.opcheck(op.attention, (*packed, cu_q, cu_q, None, 64, None, 0, 7, 7, 0.3, -1, -1, "reference"))
    torch.library.opcheck(
        op.attention, (*packed, cu_q, cu_q, None, 64, None, 0, 7, 7, 0.3, -1, -1, "auto", random_bias(2, 3))
    )


@given(
    segments=segments, heads=st.sampled_from(HEADS), causal=st.booleans(), window=windows, padding=st.integers(0, 3),
    reach=reaches,
)  # fmt: skip
def test_the_entry_knows_keys_of_other_lengths_causal_attention_windows_and_biases(
    segments, heads, causal, window, padding, reach
):
    lengths, lengths_k = zip(*segments, strict=True)
    q, k, v = random_qkv(lengths, lengths_k, *heads, padding=padding)
    cu_q, cu_k = boundaries(lengths), boundaries(lengths_k)
    schedule = vg.attention.tile_schedule(cu_q, 9, rows=q.shape[0], heads=heads[0], head_dim=8, cu_seqlens_k=cu_k)
    bias = random_bias(heads[0], reach)
    options = {"cu_seqlens_k": cu_k, "max_seqlen_k": 9, "causal": causal, "window": window, "bias": bias}
    out = vg.varlen_attention(q, k, v, cu_q, 9, **options)
    expected = naive_attention(q, k, v, lengths, lengths_k, 8**-0.5, window[0], 0 if causal else window[1], bias)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(vg.varlen_attention(q, k, v, cu_q, 9, schedule=schedule, **options), out)


def test_the_compiler_sees_one_graph_for_all_numbers_of_rows():
    def layer(q, k, v, cu_seqlens, schedule):
        q, k = vg.kernels.apply_rotary(q, k, q[:, 0], k[:, 0])
        whole = vg.varlen_attention(q, k, v, cu_seqlens, 1000, schedule=schedule)
        bias = torch.arange(10.0).view(5, 2).T.repeat(q.shape[1] // 2, 1)
        return whole + vg.varlen_attention(q, k, v, cu_seqlens, 1000, window=(3, -1), causal=True, bias=bias)

    def from_boundaries(q, k, v, cu_seqlens, heads=2, head_dim=8):
        schedule = vg.attention.tile_schedule(cu_seqlens, 1000, rows=len(q), heads=heads, head_dim=head_dim)
        return layer(q, k, v, cu_seqlens, schedule)

    # Of so many heads these rows take tiles of other sizes.
    choosing = [partial(from_boundaries, heads=300, head_dim=head_dim) for head_dim in (72, 96)]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for function in (layer, from_boundaries, *choosing):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        for rows in (10, 100, 128, 500):
            arguments = [*random_qkv([rows - 3], padding=3), boundaries([3, rows - 6], empty=2)]
            if function is layer:
                arguments.append(vg.attention.tile_schedule(arguments[3], 1000, rows=rows, heads=2, head_dim=8))
            torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert len(graphs) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(5, 2, 8)},
            "varlen_attention got q torch.float32 [12, 2, 8] on cpu, k torch.float32 [5, 2, 8] on cpu, v torch.float32 "
            "[12, 2, 8] on cpu: expected [rows, heads, head_dim] of one floating dtype and device, k and v of one shape",
        ),
        ({name: torch.zeros(12, 2, 8, dtype=torch.int64) for name in "qkv"}, "of one floating dtype and device"),
        ({"q": torch.zeros(12, 3, 8)}, "with a number of heads that divides that of q"),
        ({"q": torch.zeros(12, 2, 8, dtype=torch.float16)}, "of one floating dtype and device"),
        ({"q": torch.zeros(12, 2, 8, device="meta")}, "q torch.float32 [12, 2, 8] on meta"),
        ({"k": torch.zeros(12, 0, 8), "v": torch.zeros(12, 0, 8)}, "k torch.float32 [12, 0, 8]"),
        ({name: torch.zeros(12, 2, 0) for name in "qkv"}, "q torch.float32 [12, 2, 0]"),
        (
            {"cu_seqlens": torch.tensor([0, 12])},
            "cu_seqlens is torch.int64 [2] on cpu: expected int32 [segments + 1] on cpu; try .int()",
        ),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, "cu_seqlens is torch.int32 [0] on cpu: expected int32 [segments"),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32, device="meta")}, "cu_seqlens_k is torch.int32 [2] on meta"),
        (
            {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)},
            "cu_seqlens_k is [3], cu_seqlens [2]: expected as many segments of keys as of queries",
        ),
        ({"scale": 0.0}, "scale=0.0, window=(-1, -1): expected scale > 0 and window sizes of at least -1"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"window": (-2, 0)}, "window=(-2, 0)"),
        (
            {"schedule": vg.attention.tile_schedule(boundaries([12]), 12, rows=100, heads=2, head_dim=8)},
            "the schedule was computed for 100 query rows, but q has 12: compute it with rows=12",
        ),
        (
            {"schedule": vg.attention.tile_schedule(boundaries([12]), 12, rows=12, heads=2, head_dim=8)},
            "the schedule was computed from other tensors than cu_seqlens and cu_seqlens_k, and its segments would be used",
        ),
        ({"max_seqlen": -1}, "max_seqlen=-1, max_seqlen_k=-1: expected integers of at least 0"),
        ({"backend": "flash"}, "attention backend 'flash': expected one of ('auto', 'triton', 'hopper', 'torch', 'reference')"),
        (
            {"backend": "torch"},
            "attention backend 'torch' got torch.float32 on cpu with head_dim 8: expected float16 or",
        ),
        (
            {"backend": "triton"},
            "attention backend 'triton' got torch.float32 on cpu with head_dim 8: expected float16, bfloat16 or float32 "
            "on CUDA, head_dim up to 256; use backend='auto' or 'reference'",
        ),
        (
            {"k": torch.zeros(12, 1, 8), "v": torch.zeros(12, 1, 8), "backend": "torch"},
            "got 2 query heads and 1 key heads: expected as many of each",
        ),
        ({"bias": torch.zeros(2, 3), "backend": "torch"}, "attention backend 'torch' got a bias: expected none"),
        ({"bias": [0.0]}, "bias is of type list: expected a tensor"),
        (
            {"bias": torch.zeros(2, 4)},
            "bias is torch.float32 [2, 4] on cpu: expected floating [2, 2 * reach + 1] on cpu, an entry for each head and",
        ),
        ({"bias": torch.zeros(1, 3)}, "bias is torch.float32 [1, 3] on cpu"),
        ({"bias": torch.zeros(2, 3, dtype=torch.int64)}, "bias is torch.int64 [2, 3] on cpu"),
        ({"bias": torch.zeros(2, 3, device="meta")}, "bias is torch.float32 [2, 3] on meta"),
        ({"bias": torch.zeros(2, 3, 1)}, "bias is torch.float32 [2, 3, 1] on cpu"),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_was_expected(change, message):
    q, k, v = random_qkv([12])
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens": boundaries([12]), "max_seqlen": 12}
    with pytest.raises(vg.errors.InputError, match=re.escape(message)):
        vg.varlen_attention(**(arguments | change))


def test_autocast_casts_as_it_does_for_attention_of_torch():
    q, k, v = random_qkv([12])
    with torch.autocast("cpu", torch.bfloat16):
        out = vg.varlen_attention(q, k.bfloat16(), v, boundaries([12]), 12)
        wide = vg.varlen_attention(q.double(), k.double(), v.double(), boundaries([12]), 12)
    assert out.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    torch.testing.assert_close(out.double(), wide, rtol=0.05, atol=0.05)


def test_a_schedule_without_the_keys_is_not_taken_for_cross_attention():
    q, k, v = random_qkv([3, 9], [20, 10])
    cu_q, cu_k = boundaries([3, 9]), boundaries([20, 10])
    schedule = vg.attention.tile_schedule(cu_q, 9, rows=12, heads=2, head_dim=8)
    with pytest.raises(vg.errors.InputError, match="other tensors than cu_seqlens and cu_seqlens_k"):
        vg.varlen_attention(q, k, v, cu_q, 9, cu_seqlens_k=cu_k, max_seqlen_k=20, schedule=schedule)
    again = cu_q.view(-1)  # another tensor in the same memory
    assert vg.varlen_attention(q, q, q, again, 9, schedule=schedule).shape == q.shape


def test_a_schedule_of_other_segments_than_attention_is_refused():
    class Module(torch.nn.Module):
        def forward(self, x, cu_seqlens, schedule):
            x = x.unflatten(1, (2, 8))
            return vg.varlen_attention(x, x, x, cu_seqlens, 64, schedule=schedule).flatten(1)

    def encoder(per):
        buffers = [vg.buffers.CuSeqlens(per="frame"), vg.buffers.AttentionSchedule(heads=2, head_dim=8, per=per)]
        spec = vg.BufferSpec(rows="x", layout=vg.GridTHW("grid"), buffers=buffers, outputs=vg.outputs.Rows())
        return vg.GraphedEncoder(Module().eval(), [64], spec, backend="tape")

    x, grid = torch.randn(24, 16), [(3, 2, 4)]
    assert encoder("frame")(x, grid=grid).shape == x.shape
    with pytest.raises(vg.errors.InputError, match="declare AttentionSchedule with the per= and queries= of CuSeqlens"):
        encoder("item")(x, grid=grid)


def test_implementations_of_flash_attention_that_nan_crosses_items_in_are_refused(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    q, k, v = random_qkv([12])
    arguments = q, k, v, boundaries([12]), 12
    with pytest.raises(vg.errors.InputError, match=r"'torch' got FA3 .*: expected FA2"):
        vg.varlen_attention(*arguments, backend="torch")
    assert vg.varlen_attention(*arguments).shape == q.shape


def test_a_backend_is_two_functions_and_an_entry_in_the_registry(monkeypatch):
    assert get_args(backends.AttentionBackend) == ("auto", *backends.BACKENDS)
    assert [*backends.BACKENDS][-1] == "reference"

    class Ones:
        def refusal(self, inputs, compiles):
            return "too many heads" if inputs.q.shape[1] > 2 else None

        def run(self, inputs):
            return torch.ones_like(inputs.q)

    def inputs(heads):
        tensors = random_qkv([3], heads=heads), boundaries([3])
        return AttentionInputs(*tensors[0], tensors[1], tensors[1], None, 0, None, 0, 3, 3, 1.0, -1, -1)

    monkeypatch.setitem(backends.BACKENDS, "ones", Ones())
    assert (backends.run(inputs(2), "ones") == 1).all()
    assert (backends.run(inputs(2), "auto") == 1).all()
    assert torch.equal(backends.run(inputs(3), "auto"), backends.run(inputs(3), "reference"))
    with pytest.raises(
        vg.errors.InputError, match="backend 'ones' got too many heads; use backend='auto' or 'reference'"
    ):
        backends.run(inputs(3), "ones")


def test_boundaries_may_be_a_column():
    q, k, v = random_qkv([10, 20])
    column = torch.tensor([[0, 7], [10, 7], [30, 7]], dtype=torch.int32)[:, 0]
    schedule = vg.attention.tile_schedule(column, 20, rows=30, heads=2, head_dim=8)
    assert schedule.tiles[1:3].tolist() == [[10, 30, 10, 30, 0], [0, 10, 0, 10, 1]]
    expected = vg.varlen_attention(q, k, v, boundaries([10, 20]), 20)
    assert torch.equal(vg.varlen_attention(q, k, v, column, 20, schedule=schedule), expected)


def test_a_schedule_is_of_boundaries_that_belong_together():
    with pytest.raises(vg.errors.InputError, match=re.escape("cu_seqlens is torch.int64 [2]")):
        vg.attention.tile_schedule(torch.tensor([0, 3]), 3, rows=3, heads=1, head_dim=8)
    with pytest.raises(vg.errors.InputError, match=re.escape("cu_seqlens_k is [2], cu_seqlens [3]")):
        vg.attention.tile_schedule(boundaries([3, 4]), 4, rows=7, heads=1, head_dim=8, cu_seqlens_k=boundaries([3]))
