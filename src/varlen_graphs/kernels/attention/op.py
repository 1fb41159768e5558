"""Attention and its tile schedule, as operators of torch."""

import torch
from torch import Tensor

from varlen_graphs.kernels.attention import backends, reference
from varlen_graphs.kernels.operator import launcher, operator


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
    call = backends.Call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, tiles, block, max_seqlen_q, max_seqlen_k, scale, left, right
    )
    return backends.run(call, backend)


def _fake_attention(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _fake_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int) -> Tensor:
    tiles = reference.tile_bound(rows, cu_seqlens_q.shape[0] - 1, block)
    return torch.empty((1 + tiles, 5), dtype=torch.int32, device=cu_seqlens_q.device)


attention = operator(_attention, fake=_fake_attention)
"""`reference.varlen_attention` by one of `backends`, whose docstrings say what they do with padding rows."""

tile_schedule = operator(reference.tile_schedule, fake=_fake_schedule, cuda=launcher(__package__, "tile_schedule"))
