"""Attention within segments of packed rows, in plain torch operations: the specification."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SCORES = 2**26
"""Scores `dense` holds at a time: it takes queries in blocks of a size that keeps to this."""


@torch.library.custom_op("varlen_graphs::reference_attention", mutates_args=())
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Softmax attention of each row over the rows of its segment. No host sync, on any device.

    Rows after `cu_seqlens[-1]` are in no segment: what they hold reaches no other row, NaN included, and their output
    is zero. Nor does a value that is not finite leave its segment. The arithmetic is float32 (float64 for float64).

    Args:
        q: Queries, `[rows, heads, head_dim]`.
        k: Keys, `[rows, heads, head_dim]`.
        v: Values, `[rows, heads, head_dim]`.
        cu_seqlens: int32 `[segments + 1]`, ascending from 0; segments may be empty.
        scale: Factor on the scores.

    Returns:
        `[rows, heads, head_dim]` in the dtype of `q`, contiguous.
    """
    # On the CPU the boundaries are at hand. Elsewhere reading them would sync.
    implementation = by_segment if q.device.type == "cpu" else dense
    return implementation(q, k, v, cu_seqlens, scale)


@varlen_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def by_segment(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """One segment after the other. Arguments as in `varlen_attention`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            queries, keys, values = (x[start:end].to(wide).transpose(0, 1) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(queries[None], keys[None], values[None], scale=scale)[0]
            out[start:end] = attended.transpose(0, 1).to(q.dtype)
    return out


def dense(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """All rows against all rows under a mask, without a host sync. Arguments as in `varlen_attention`."""
    rows, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    row = torch.arange(rows, device=q.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    active = row < cu_seqlens[-1:]

    # A masked product still multiplies, and 0 * NaN is NaN: so what is not finite never enters a product, and the rows
    # that may see it get their NaN afterwards.
    sound = v.isfinite().flatten(1).all(1) & active
    tainted = ~sound & active
    queries, keys = (torch.where(active[:, None, None], x, 0).to(wide).transpose(0, 1) for x in (q, k))
    values = torch.where(sound[:, None, None], v, 0).to(wide).transpose(0, 1)  # [heads, rows, head_dim]

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block = max(1, MAX_SCORES // (rows * heads))
    for start in range(0, rows, block):
        at = slice(start, start + block)
        visible = (segment[at, None] == segment) & active[at, None]  # [block, rows]
        scores = (queries[:, at] @ keys.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
        weights = torch.where(visible, scores.softmax(-1), 0)  # the softmax of a row that sees nothing is NaN
        result = (weights @ values).transpose(0, 1)  # [block, heads, head_dim]
        sees_taint = (visible & tainted).any(1)[:, None, None]
        out[at] = torch.where(sees_taint, torch.nan, result).to(q.dtype)
    return out
