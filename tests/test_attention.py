import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from varlen_graphs.kernels.attention import reference


def qkv(rows, heads=2, head_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, rows, heads, head_dim, generator=generator).to(dtype).unbind(0)


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def boundaries(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("implementation", [reference.by_segment, reference.dense])
@given(lengths=lengths, padding=st.integers(0, 5), scale=st.floats(0.1, 2))
def test_each_row_attends_to_its_segment(implementation, lengths, padding, scale):
    rows = sum(lengths) + padding
    if rows == 0:
        return
    q, k, v = qkv(rows)
    out = implementation(q, k, v, boundaries(lengths), scale)
    start = 0
    for length in lengths:
        at = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[at], k[at]) * scale
        torch.testing.assert_close(out[at], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[at]))
        start += length
    assert not out[start:].any()


@pytest.mark.parametrize("implementation", [reference.by_segment, reference.dense])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_padding_and_no_other_segment_reaches_a_row(implementation, dtype):
    cu_seqlens = torch.tensor([0, 3, 3, 7, 7, 7], dtype=torch.int32)
    clean = qkv(10, dtype=dtype)
    expected = implementation(*clean, cu_seqlens, 1.0)
    for bad in (torch.nan, torch.inf, -torch.inf):
        dirty = [x.clone() for x in clean]
        for x in dirty:
            x[7:] = bad
        assert torch.equal(implementation(*dirty, cu_seqlens, 1.0), expected)
    dirty = [x.clone() for x in clean]
    dirty[2][1, 0, 0] = torch.nan  # a value of the first segment
    out = implementation(*dirty, cu_seqlens, 1.0)
    assert torch.equal(out[3:], expected[3:])
    assert out[:3, 0].isnan().any(-1).all()


@given(st.integers(1, 40))
def test_queries_are_taken_in_blocks_without_a_difference(block):
    q, k, v = qkv(40)
    cu_seqlens = boundaries([11, 20, 9])
    expected = reference.by_segment(q, k, v, cu_seqlens, 0.3)
    before = reference.MAX_SCORES
    reference.MAX_SCORES = block * 40 * 2
    try:
        torch.testing.assert_close(reference.dense(q, k, v, cu_seqlens, 0.3), expected)
    finally:
        reference.MAX_SCORES = before


def test_dense_attention_reads_nothing_on_the_host():
    q, k, v = (x.to("meta") for x in qkv(40))
    assert reference.dense(q, k, v, torch.empty(4, dtype=torch.int32, device="meta"), 1.0).shape == q.shape


def test_the_operator_is_sound_for_the_compiler():
    torch.library.opcheck(reference.varlen_attention, (*qkv(10), boundaries([3, 7]), 1.0))


def test_the_entry_defaults_to_the_usual_scale():
    q, k, v = qkv(12)
    out = vg.varlen_attention(q, k, v, torch.tensor([0, 12], dtype=torch.int32), 12)
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(5, 2, 8)},
            "got q [12, 2, 8], k [5, 2, 8], v [12, 2, 8]: expected three tensors [rows, heads",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 12])},
            "cu_seqlens is torch.int64 [2]: expected int32 [segments + 1]; try .int",
        ),
        (
            {"backend": "torch"},
            "attention backend 'torch' got torch.float32 on cpu with head_dim 8: expected float16 or",
        ),
    ],
)
def test_bad_arguments_say_what_was_expected(change, message):
    q, k, v = qkv(12)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 12], dtype=torch.int32), "max_seqlen": 12}
    with pytest.raises(vg.InputError, match=re.escape(message)):
        vg.varlen_attention(**(arguments | change))
