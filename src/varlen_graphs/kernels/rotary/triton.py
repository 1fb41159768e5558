"""Rotation of queries and keys in one launch."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Pairs of channels per program."""

WIDEST = 8
"""Maximum number of adjacent pairs: one load takes as many half-precision numbers."""


@triton.jit
def _rotate(
    x, out, cos, sin, first, rows,
    X_ROW: tl.constexpr, X_HEAD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    COS_ROW: tl.constexpr, SIN_ROW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rotate pairs in groups of `WIDE`, from group `first` on; groups are ordered by row, head and channel."""
    # A second axis of a power of two shows the compiler what is contiguous, whatever the head dimension is.
    GROUPS: tl.constexpr = HALF // WIDE
    # Large numbers are divided once per block, small ones once per group: 64-bit divisions are slow.
    index = (first % (HEADS * GROUPS)).to(tl.int32) + tl.arange(0, BLOCK // WIDE)[:, None]
    row = first // (HEADS * GROUPS) + index // (HEADS * GROUPS)
    head = (index // GROUPS % HEADS).to(tl.int64)
    channel = index % GROUPS * WIDE + tl.arange(0, WIDE)[None, :]
    here = row < rows
    at = x + row * X_ROW + head * X_HEAD + channel
    a = tl.load(at, mask=here).to(tl.float32)
    b = tl.load(at + HALF, mask=here).to(tl.float32)
    cos_at = cos + row * COS_ROW + channel
    sin_at = sin + row * SIN_ROW + channel
    first = a * tl.load(cos_at, mask=here).to(tl.float32) - b * tl.load(sin_at, mask=here).to(tl.float32)
    second = b * tl.load(cos_at + HALF, mask=here).to(tl.float32) + a * tl.load(sin_at + HALF, mask=here).to(tl.float32)
    to = out + (row * HEADS + head) * (2 * HALF) + channel
    tl.store(to, first.to(out.dtype.element_ty), mask=here)
    tl.store(to + HALF, second.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])  # rows differ between calls: one kernel for all
def _rotary(
    q, k, q_out, k_out, cos, sin, rows,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    COS_ROW: tl.constexpr, SIN_ROW: tl.constexpr, HEADS: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    queries = tl.cdiv(rows.to(tl.int64) * (HEADS * HALF), BLOCK)
    if block < queries:
        group = block * (BLOCK // WIDE)
        _rotate(q, q_out, cos, sin, group, rows, Q_ROW, Q_HEAD, HEADS, HALF, COS_ROW, SIN_ROW, BLOCK, WIDE)
    else:
        group = (block - queries) * (BLOCK // WIDE)
        _rotate(k, k_out, cos, sin, group, rows, K_ROW, K_HEAD, HEADS_K, HALF, COS_ROW, SIN_ROW, BLOCK, WIDE)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `reference.apply_rotary` in one launch; reads `q` and `k` in place from a packed projection."""
    rows, heads, head_dim = q.shape
    heads_k, half = k.shape[1], head_dim // 2
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if rows:
        grid = triton.cdiv(rows * heads * half, BLOCK) + triton.cdiv(rows * heads_k * half, BLOCK)
        launch(_rotary, (grid,),
            q, k, q_out, k_out, cos, sin, rows, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0),
            HEADS=heads, HEADS_K=heads_k, HALF=half, BLOCK=BLOCK, WIDE=math.gcd(half, WIDEST),
        )  # fmt: skip
    return q_out, k_out
