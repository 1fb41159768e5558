"""Attention as a torch operator, opaque to `torch.compile`."""

import torch
from torch import Tensor

from varlen_graphs.attention import backends
from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.kernels.launch import Compiling
from varlen_graphs.kernels.operator import operator, uses_references


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tiles: Tensor | None, block: int,
    long_tiles: Tensor | None, long_block: int, max_seqlen_q: int, max_seqlen_k: int, scale: float, left: int,
    right: int, backend: str, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    inputs = AttentionInputs(
        q, k, v, cu_seqlens_q, cu_seqlens_k, tiles, block, long_tiles, long_block, max_seqlen_q, max_seqlen_k, scale,
        left, right, bias,
    )  # fmt: skip
    try:
        return backends.run(inputs, "reference" if uses_references() else backend)
    except Compiling:
        return backends.run(inputs, "reference")


def _fake(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


attention = operator(_attention, fake=_fake)
"""`kernel.reference.varlen_attention`, computed by one of `backends`; their `run` says what padding rows hold."""
