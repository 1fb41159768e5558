"""Attention within segments of packed rows, in plain torch operations: the specification."""

import torch
from torch import Tensor

MAX_SCORES = 2**24
"""Scores held at a time: queries are taken in blocks of a size that keeps to this."""


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
        `[rows, heads, head_dim]` in the dtype of `q`.
    """
    rows, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    row = torch.arange(rows, device=q.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    active = (row < cu_seqlens[-1:])[:, None, None]

    # A masked product still multiplies: 0 * NaN is NaN. So what is masked is never loaded into a product.
    sound = (v.isfinite().flatten(1).all(1) & active[:, 0, 0])[:, None, None]
    queries, keys = (torch.where(active, x, 0).to(wide).transpose(0, 1) for x in (q, k))  # [heads, rows, head_dim]
    values = torch.where(sound, v, 0).to(wide).transpose(0, 1)
    tainted = (~sound & active)[:, 0, 0]

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block = max(1, MAX_SCORES // (rows * heads))
    for start in range(0, rows, block):
        at = slice(start, start + block)
        visible = (segment[at, None] == segment[None]) & active[at, 0]  # [block, rows]
        scores = (queries[:, at] @ keys.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
        weights = torch.where(visible, scores.softmax(-1), 0)  # a row that sees nothing has the softmax NaN
        result = (weights @ values).transpose(0, 1)  # [block, heads, head_dim]
        sees_taint = (visible & tainted).any(1)[:, None, None]
        out[at] = torch.where(sees_taint, torch.nan, result).to(q.dtype)
    return out
