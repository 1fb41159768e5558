"""The attention operators that torch sees: opaque to its compiler, recorded by the tape, free of host syncs."""

import torch
from torch import Tensor

from varlen_graphs.kernels.attention import backends, reference


@torch.library.custom_op("varlen_graphs::attention", mutates_args=())
def attention(
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
    """`reference.varlen_attention` by a backend of `backends`, whose docstrings say what they do with padding rows."""
    call = backends.Call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, tiles, block, max_seqlen_q, max_seqlen_k, scale, left, right
    )
    return backends.run(call, backend)


@attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("varlen_graphs::tile_schedule", mutates_args=())
def tile_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int) -> Tensor:
    """`reference.tile_schedule`."""
    if not cu_seqlens_q.is_cuda:
        return reference.tile_schedule(cu_seqlens_q, cu_seqlens_k, rows, block)
    from varlen_graphs.kernels.attention import triton

    with torch.cuda.device_of(cu_seqlens_q):
        return triton.tile_schedule(cu_seqlens_q, cu_seqlens_k, rows, block)


@tile_schedule.register_fake
def _(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int) -> Tensor:
    tiles = reference.tile_bound(rows, cu_seqlens_q.shape[0] - 1, block)
    return torch.empty((1 + tiles, 5), dtype=torch.int32, device=cu_seqlens_q.device)
