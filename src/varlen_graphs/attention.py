"""Attention within segments: one entry, several backends, and what each of them promises about padding.

Every backend promises the same: rows after `cu_seqlens[-1]` are padding, they may hold anything, NaN included, and no
other row changes by a bit because of them. What a backend leaves in the padding rows of its own output differs:

- `reference`: zeros.
- `torch`: anything. FlashAttention 2 loads keys and values under a bound on the length of their segment, so rows that
  are in no segment are never read, and the row-wise operations between two attentions keep them to themselves.
"""

from typing import Literal, cast, get_args

import torch
import torch.nn.attention
from torch import Tensor

from varlen_graphs.errors import InputError
from varlen_graphs.kernels.attention import reference

Backend = Literal["auto", "torch", "reference"]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax attention of each packed row over the rows of its segment. Never syncs with the host.

    Args:
        q: Queries, `[rows, heads, head_dim]`, the last dimension contiguous.
        k: Keys, as `q`.
        v: Values, as `q`.
        cu_seqlens: int32 `[segments + 1]`: starts at 0, ascends, the tail may repeat the last value.
        max_seqlen: At least the rows of the longest segment. Frozen at capture, so an upper bound.
        scale: Factor on the scores, default `head_dim ** -0.5`.
        backend: `"torch"` (`torch.nn.attention.varlen`, CUDA, float16 and bfloat16), `"reference"` (any device and
            dtype, memory that grows with the square of the rows), or `"auto"`: the first that takes these inputs.

    Returns:
        `[rows, heads, head_dim]`, dtype of `q`; padding rows hold what the backend leaves there (see above).

    Raises:
        InputError: Shapes that differ, `cu_seqlens` of another dtype, or a backend that does not take these inputs.
    """
    if backend not in get_args(Backend):
        raise InputError(f"attention backend {backend!r}: expected one of {get_args(Backend)}")
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise InputError(
            f"varlen_attention got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: "
            "expected three tensors [rows, heads, head_dim] of one shape"
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise InputError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: expected int32 [segments + 1]; try .int()"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "auto":
        backend = "torch" if _torch_takes(q) else "reference"
    if backend == "reference":
        return cast(Tensor, reference.varlen_attention(q, k, v, cu_seqlens, scale))
    if not _torch_takes(q):
        raise InputError(
            f"attention backend 'torch' got {q.dtype} on {q.device} with head_dim {q.shape[-1]}: expected float16 or "
            "bfloat16 on CUDA, head_dim a multiple of 8 up to 256; use backend='reference' or 'auto'"
        )
    from torch.nn.attention.varlen import varlen_attn

    _refuse_other_than_flash2()
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale)
    return cast(Tensor, out)  # a tuple only if more is asked for


def _torch_takes(q: Tensor) -> bool:
    head_dim = q.shape[-1]
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256


def _refuse_other_than_flash2() -> None:
    """FA3 and FA4 load whole tiles, past the end of a segment: the promise above would not hold for them."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if current not in (None, "FA2"):
        raise InputError(
            f"torch runs its varlen attention on {current}, which reads padding rows; expected FlashAttention 2: "
            "call torch.nn.attention.restore_flash_attention_impl(), or use backend='reference'"
        )
