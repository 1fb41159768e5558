"""Attention, as an operator of torch."""

import torch
from torch import Tensor

from varlen_graphs.attention import backends
from varlen_graphs.attention.call import Call
from varlen_graphs.kernels.operator import operator


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    tiles: Tensor | None,
    block: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    backend: str,
) -> Tensor:
    call = Call(q, k, v, cu_seqlens_q, cu_seqlens_k, tiles, block, max_seqlen_q, max_seqlen_k, scale, left, right)
    return backends.run(call, backend)


def _fake(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


attention = operator(_attention, fake=_fake)
"""`reference.varlen_attention` by one of `backends`, whose docstrings say what they do with padding rows."""
