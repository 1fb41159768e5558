"""Attention within segments of packed rows, in plain torch operations: the specification."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SCORES = 2**26
"""Maximum number of scores that `dense` holds at a time; it processes queries in blocks of that size."""


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, left: int, right: int,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax attention of each query row over the key rows of its segment. No host sync, on any device.

    Arguments as in the public `varlen_attention`, with `window=(left, right)`; segments may be empty. The result is
    contiguous, in the dtype of `q`. Rows after the last boundary belong to no segment: their content, NaN included,
    affects no other row, and their output is zero. The output of a query that sees no key is zero, too. A value that is
    not finite affects only its own segment. The arithmetic is float32 (float64 for float64).

    `bias[:, reach + offset]` is added to the scaled scores of keys `offset` positions after the query; offsets are
    clamped to `-reach..reach`. Positions are those of windows: a segment's last query is aligned with its last key.
    """
    # The CPU can read the boundaries; on other devices that would sync.
    implementation = by_segment if q.device.type == "cpu" else dense
    return implementation(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, bias)


def by_segment(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, left: int, right: int,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute one segment after the other. Arguments as in `varlen_attention`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.to(wide).transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, rows, head_dim]
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    segments, segments_k = (pairwise(cu_seqlens.tolist()) for cu_seqlens in (cu_seqlens_q, cu_seqlens_k))
    for (start, end), (start_k, end_k) in zip(segments, segments_k, strict=True):
        if start < end and start_k < end_k:
            mask, blind = None, None
            if left >= 0 or right >= 0 or bias is not None:
                row, key = torch.arange(start, end, device=q.device), torch.arange(start_k, end_k, device=q.device)
                distance = key - end_k - (row[:, None] - end)
                mask = _in_window(distance, left, right)
                blind = ~mask.any(1)
                mask = mask | blind[:, None]
                if bias is not None:
                    mask = _at(bias, distance).to(wide).masked_fill(~mask, -torch.inf)
            own, own_k = slice(start, end), slice(start_k, end_k)
            attended = F.scaled_dot_product_attention(
                queries[:, :, own], keys[:, :, own_k], values[:, :, own_k], mask, scale=scale
            )[0]
            if blind is not None:
                attended = torch.where(blind[:, None], 0, attended)
            out[own] = attended.transpose(0, 1)
    return out


def dense(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, left: int, right: int,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute all rows against all rows under a mask, without a host sync. Arguments as in `varlen_attention`."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    segment, active = _segments(cu_seqlens_q, q.shape[0])
    same = cu_seqlens_k is cu_seqlens_q and len(k) == len(q)
    segment_k, active_k = (segment, active) if same else _segments(cu_seqlens_k, k.shape[0])
    by_place = left >= 0 or right >= 0 or bias is not None
    if by_place:
        place, place_k = _places(cu_seqlens_q, segment), _places(cu_seqlens_k, segment_k)

    # A masked product still multiplies, and 0 * NaN is NaN: values that are not finite must not enter a product. The
    # rows that see such a value are set to NaN afterwards.
    sound = v.isfinite().flatten(1).all(1) & active_k
    tainted = ~sound & active_k
    values = torch.where(sound[:, None, None], v, 0).to(wide).transpose(0, 1)
    queries, keys = q.to(wide).transpose(0, 1), k.to(wide).transpose(0, 1)
    if group > 1:
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block = MAX_SCORES // max(1, k.shape[0] * heads) or 1
    for start in range(0, q.shape[0], block):
        at = slice(start, start + block)
        visible = (segment[at, None] == segment_k) & active[at, None]  # [block, rows_k]
        scores = queries[:, at] @ keys.transpose(1, 2) * scale
        if by_place:
            distance = place_k - place[at, None]
            visible = visible & _in_window(distance, left, right)
            if bias is not None:
                scores = scores + _at(bias, distance)
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = torch.where(visible, scores.softmax(-1), 0)  # the softmax of a row that sees no key is NaN
        result = (weights @ values).transpose(0, 1)  # [block, heads, head_dim]
        sees_taint = (visible & tainted).any(1)[:, None, None]
        out[at] = torch.where(sees_taint, torch.nan, result).to(q.dtype)
    return out


def _segments(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return for each row its segment, one past the last for rows of none, and a mask of rows in a segment."""
    row = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True), row < cu_seqlens[-1:]


def _places(cu_seqlens: Tensor, segment: Tensor) -> Tensor:
    """Return for each row its place relative to the end of its segment."""
    row = torch.arange(len(segment), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return row - cu_seqlens[(segment + 1).clamp(max=cu_seqlens.shape[0] - 1)]


def _at(bias: Tensor, distance: Tensor) -> Tensor:
    """Return the biases `[heads, ...]` of pairs whose keys lie `distance` after their queries."""
    reach = bias.shape[1] // 2
    return bias[:, distance.clamp(-reach, reach) + reach]


def _in_window(distance: Tensor, left: int, right: int) -> Tensor:
    """Return a mask of the pairs whose query sees the key, which lies `distance` after it."""
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        inside = inside & (distance >= -left)
    if right >= 0:
        inside = inside & (distance <= right)
    return inside
