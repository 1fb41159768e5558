"""The Triton kernel of `varlen_attention` against its references, in an interpreter that multiplies no bfloat16 matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.segments import (
    between_garbage,
    boundaries,
    heads_first,
    naive_attention,
    random_bias,
    random_qkv,
    relative,
    unaligned,
)
from varlen_graphs.attention.kernel import reference
from varlen_graphs.attention.kernel.config import split
from varlen_graphs.attention.tile_schedule import reference as schedule_reference
from varlen_graphs.attention.tile_schedule import triton as schedule_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, in tests/gpu")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def launch(q, k, v, cu_q, cu_k=None, block=64, scale=0.3, left=-1, right=-1, bias=None):
    from varlen_graphs.attention.kernel import triton

    tiles = schedule_kernel.tile_schedule(cu_q, cu_q if cu_k is None else cu_k, q.shape[0], block, 100)
    return triton.attention(q, k, v, tiles, block, scale, left, right, bias)


def check_attention(q, k, v, lengths, lengths_k=None, block=64, left=-1, right=-1, bias=None):
    lengths_k = lengths if lengths_k is None else lengths_k
    out = launch(q, k, v, boundaries(lengths), boundaries(lengths_k), block, 0.3, left, right, bias)
    expected = naive_attention(q, k, v, lengths, lengths_k, 0.3, left, right, bias)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert relative(out, expected) <= TOLERANCE[q.dtype]
    assert not out[sum(lengths) :].any()


segments = st.lists(st.tuples(st.sampled_from([0, 1, 5, 64, 65, 200]), st.integers(0, 5)), min_size=1, max_size=20)


@settings(max_examples=20)
@given(segments, st.integers(0, 150), st.sampled_from([64, 128, 192]), st.sampled_from([1, 3, 5, 10]))
def test_the_schedule_equals_the_reference(segments, padding, block, long):

    lengths, lengths_k = (boundaries(x) for x in zip(*segments, strict=True))
    rows = int(lengths[-1]) + padding
    got = schedule_kernel.tile_schedule(lengths, lengths_k, rows, block, long)
    expected = schedule_reference.tile_schedule(lengths, lengths_k, rows, block, long)
    assert got.shape == expected.shape
    count = 1 + int(expected[0, 0])
    assert torch.equal(got[:count], expected[:count])


@pytest.mark.parametrize(
    ("ends", "ends_k"),
    [
        ([4, 40], None), ([40, 90], None), ([100, 0, 100, 0, 100], None), ([-5, 7], None), ([2**31 - 1] * 3, None),
        ([-(2**31), 10], None), ([4, 8], [50, 0]), ([4, 8], [-(2**31), 2**31 - 1]), ([8, 4], [2**31 - 1, -(2**31)]),
    ],
)  # fmt: skip
def test_no_tile_is_of_rows_that_are_not_there_whatever_the_boundaries_are(ends, ends_k):
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
    cu_seqlens_k = cu_seqlens if ends_k is None else torch.tensor([0, *ends_k], dtype=torch.int32)
    bound = 1 + schedule_reference.tile_bound(10, len(ends), 64)
    memory = torch.full((bound + 20, 5), -7, dtype=torch.int32)

    def here(shape, **options):
        assert shape == (bound, 5)
        return memory[10 : 10 + bound]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", here)
        tiles = schedule_kernel.tile_schedule(cu_seqlens, cu_seqlens_k, 10, 64, 1)
    assert 0 <= tiles[0, 1] <= tiles[0, 0] < bound
    assert (tiles[1 : 1 + tiles[0, 0], 0] >= 0).all()
    assert (tiles[1 : 1 + tiles[0, 0], 1] <= 10).all()
    assert (tiles[1 : 1 + tiles[0, 0], 2] >= 0).all()
    assert (tiles[1 : 1 + tiles[0, 0], 3] >= tiles[1 : 1 + tiles[0, 0], 2]).all()
    assert (memory[:10] == -7).all()
    assert (memory[10 + bound :] == -7).all()


@pytest.mark.parametrize("slots", [150, 300])
def test_the_schedule_of_many_slots_and_of_one_long_segment(slots):

    lengths = [3] * 140 + [64 * 70 + 1]  # more segments than a chunk, more tiles than a program writes at a time
    cu_seqlens = boundaries(lengths, empty=slots - len(lengths))
    got = schedule_kernel.tile_schedule(cu_seqlens, cu_seqlens, sum(lengths) + 9, 64, 512)
    expected = schedule_reference.tile_schedule(cu_seqlens, cu_seqlens, sum(lengths) + 9, 64, 512)
    count = 1 + int(expected[0, 0])
    assert torch.equal(got[:count], expected[:count])


@pytest.mark.parametrize("ends", [[4, 500], [-5, 7], [2**31 - 1], [-(2**31), 10]])
def test_no_key_is_read_that_is_not_there_whatever_the_boundaries_are(ends):
    q, k, v = random_qkv([10])
    memory = torch.full((3, 100, *q.shape[1:]), torch.nan)
    memory[:, 40:50] = torch.stack([q, k, v])
    q, k, v = memory[:, 40:50].unbind()
    assert launch(q, k, v, torch.tensor([0, *ends], dtype=torch.int32)).isfinite().all()


@given(segments, st.integers(0, 30), st.sampled_from([64, 128]))
@settings(max_examples=20)
def test_rows_of_long_segments_are_left_to_another_kernel(segments, padding, block):
    from varlen_graphs.attention.kernel import triton

    lengths = [length for length, _ in segments]
    q, k, v = random_qkv(lengths, padding=padding)
    cu_seqlens, long = boundaries(lengths), torch.full_like(q, 7.0)
    tiles = schedule_kernel.tile_schedule(cu_seqlens, cu_seqlens, q.shape[0], block, 100)
    out = triton.attention(q, k, v, tiles, block, 0.3, -1, -1, long=long)
    assert out is long
    is_long = torch.tensor([length >= 100 for length in [*lengths, 0]]).repeat_interleave(
        torch.tensor([*lengths, padding])
    )
    assert (out[is_long] == 7).all()
    expected = naive_attention(q, k, v, lengths, lengths, 0.3)
    assert relative(out[~is_long], expected[~is_long]) <= TOLERANCE[q.dtype]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 80, 96, 112, 128, 192])
def test_every_head_dimension(head_dim, block):
    lengths = [70, 0, 1]
    check_attention(*random_qkv(lengths, head_dim=head_dim, padding=3), lengths, block=block)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130])
def test_lengths_around_the_edges_of_blocks(length):
    lengths = [length, 5]
    check_attention(*random_qkv(lengths, heads=1, head_dim=40), lengths)
    check_attention(*random_qkv([5, 9], lengths, heads=1, head_dim=40), [5, 9], lengths)


@pytest.mark.parametrize("head_dim", [40, 64, 72, 88, 104])
def test_half_precision(head_dim):
    lengths = [200, 33, 96, 64]
    check_attention(*random_qkv(lengths, head_dim=head_dim, dtype=torch.float16, padding=7), lengths)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "heads", "begin", "ahead"),
    [
        (72, torch.float16, 4, 0, 8),
        (72, torch.float16, 4, 16, 8),
        (72, torch.float16, 4, 8, 0),  # the first head begins amid a sector of memory
        (72, torch.float16, 3, 0, 0),  # every second row does
        (40, torch.float16, 2, 0, 8),
        (104, torch.float16, 2, 0, 8),
        (36, torch.float32, 4, 0, 4),
        (64, torch.float16, 4, 0, 0),
        (68, torch.float16, 4, 0, 0),  # heads lie 136 bytes apart, which descriptors do not take
    ],
)
def test_blocks_begin_where_sectors_of_memory_begin(head_dim, dtype, heads, begin, ahead):
    from varlen_graphs.attention.kernel import triton

    lengths = [65, 40]
    q, k, v = random_qkv(lengths, lengths, heads, heads, head_dim, padding=5, dtype=dtype)
    flat = torch.full((begin + k.numel(),), torch.nan, dtype=dtype)
    flat[begin:] = k.flatten()
    moved = flat[begin:].view(k.shape)
    assert triton.elements_ahead(moved, sum(split(head_dim))) == ahead
    check_attention(q, moved, v, lengths)
    check_attention(q, v, moved, lengths)


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float16), (64, torch.float16), (80, torch.float16)])
def test_what_lies_between_heads_is_not_read(head_dim, dtype):
    """Heads lie eight channels further apart than they are long, and there is NaN in between."""
    lengths = [100, 70]
    q, k, v = random_qkv(lengths, heads=4, head_dim=head_dim, dtype=dtype)
    check_attention(q, between_garbage(k), between_garbage(v), lengths)


WINDOWS = [(-1, 0), (0, 0), (5, -1), (-1, 5), (20, 3), (40, 40), (200, 200), (0, -1)]


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_of_keys_of_other_lengths_and_several_query_heads(window):
    lengths, lengths_k = [70, 3, 90, 0], [150, 40, 20, 7]  # in the third the first queries see nothing to their left
    check_attention(*random_qkv(lengths, lengths_k, heads=2, heads_k=1, head_dim=16), lengths, lengths_k, 64, *window)


@pytest.mark.parametrize("window", [(-1, 0), (70, -1), (30, 100)])
def test_windows_over_blocks_of_128_keys(window):
    lengths, lengths_k = [70, 200], [300, 210]
    qkv = random_qkv(lengths, lengths_k, heads=1, head_dim=32, dtype=torch.float16)
    check_attention(*qkv, lengths, lengths_k, 64, *window)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(*[st.integers(0, 80)] * 2), min_size=1, max_size=3), st.sampled_from([(1, 1), (4, 2)]),
    st.tuples(*[st.integers(-1, 90)] * 2), st.integers(0, 70), st.none() | st.sampled_from([0, 1, 7, 70, 100]),
)  # fmt: skip
def test_any_segments_windows_and_biases(segments, heads, window, padding, reach):
    lengths, lengths_k = zip(*segments, strict=True)
    qkv = random_qkv(lengths, lengths_k, *heads, head_dim=16, padding=padding)
    check_attention(*qkv, lengths, lengths_k, 64, *window, random_bias(heads[0], reach))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reach", "kept", "window"),
    [
        (32, torch.float16, 40, torch.float16, (-1, -1)),  # blocks of 128, 64, 32 and 16 keys
        (72, torch.float16, 128, torch.float32, (-1, 0)),
        (40, torch.float32, 300, torch.bfloat16, (70, 30)),
        (16, torch.float32, 0, torch.float32, (-1, -1)),
    ],
)
def test_biases_in_all_blocks_of_keys_within_their_reach_and_beyond(head_dim, dtype, reach, kept, window):
    lengths = [200, 0, 33, 64]
    qkv = random_qkv(lengths, heads=4, heads_k=2, head_dim=head_dim, dtype=dtype, padding=7)
    for x in qkv:
        x[sum(lengths) :] = torch.nan
    check_attention(*qkv, lengths, None, 64, *window, random_bias(4, reach, kept))


def test_a_bias_that_is_zero_changes_nothing():
    qkv, cu_seqlens = random_qkv([150, 20], head_dim=40), boundaries([150, 20])
    torch.testing.assert_close(launch(*qkv, cu_seqlens, bias=torch.zeros(2, 5)), launch(*qkv, cu_seqlens))


@pytest.mark.parametrize(
    ("rows", "rows_k", "lengths", "lengths_k"),
    [(0, 0, [0], [0]), (0, 4, [0, 0], [4, 0]), (5, 0, [5], [0]), (5, 0, [0, 3], [0, 0]), (70, 3, [0], [3]), (9, 9, [4, 5], [0, 9]), (5, 5, [], [])],
)  # fmt: skip
def test_no_rows_no_keys_and_no_segments(rows, rows_k, lengths, lengths_k):
    q, k, v = torch.randn(rows, 2, 16), torch.randn(rows_k, 2, 16), torch.randn(rows_k, 2, 16)
    for window in ((-1, -1), (2, 2)):
        check_attention(q, k, v, lengths, lengths_k, 64, *window)
        torch.testing.assert_close(
            reference.dense(q, k, v, boundaries(lengths), boundaries(lengths_k), 0.3, *window),
            naive_attention(q, k, v, lengths, lengths_k, 0.3, *window).float(),
        )


def interleaved(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)[:, ::2]


@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize("layout", [heads_first, between_garbage, unaligned, interleaved])
def test_layouts_are_read_where_they_lie_and_nothing_beside_them(layout, head_dim):
    lengths = [70, 40]
    q, k, v = random_qkv(lengths, head_dim=head_dim)
    expected = launch(q, k, v, boundaries(lengths))
    for arguments in ((layout(q), layout(k), layout(v)), (q, layout(k), v), (q, k, layout(v))):
        torch.testing.assert_close(launch(*arguments, boundaries(lengths)), expected)


def test_one_head_for_all_and_one_row_for_all_keys():
    lengths = [70]
    q, k, v = random_qkv(lengths, heads=4, heads_k=1, head_dim=16)
    check_attention(q, k.expand(-1, 4, -1), v.expand(-1, 4, -1), lengths)
    check_attention(q, k[:1].expand(70, 4, -1), v[:1].expand(70, 4, -1), lengths)


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, torch.float16), (40, torch.float32)])
def test_a_packed_projection_whose_padding_and_slots_change_nothing(head_dim, dtype):
    lengths, rows = [70, 0, 33], 140
    packed = torch.randn(rows, 3, 2, head_dim).to(dtype)
    expected = launch(*packed.unbind(1), boundaries(lengths))
    assert relative(expected, naive_attention(*packed.unbind(1), lengths, lengths, 0.3)) <= TOLERANCE[dtype]
    for bad, empty in ((torch.nan, 0), (torch.nan, 40), (torch.inf, 1)):
        packed[sum(lengths) :] = bad
        assert torch.equal(launch(*packed.unbind(1), boundaries(lengths, empty)), expected)
    packed[75, 2, 0, 0] = torch.nan  # a value of the last segment
    out = launch(*packed.unbind(1), boundaries(lengths))
    assert torch.equal(out[:70], expected[:70])
    assert out[70:103, 0, 0].isnan().all()
