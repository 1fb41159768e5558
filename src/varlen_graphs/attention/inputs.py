"""Inputs of one attention, as backends take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.attention.schedule import long_tiles_of, tiles_of

UNALIGNED = "tensors with gaps between channels, or heads or rows that begin at no multiple of 16 bytes: expected none"
"""Reason why kernels that load vectors refuse inputs that are not `is_aligned`."""


class AttentionInputs(NamedTuple):
    """Arguments of one attention; see `varlen_attention`. Without `tiles` or `long_tiles`, its block has no meaning."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tiles: Tensor | None
    block: int
    long_tiles: Tensor | None
    long_block: int
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    left: int
    right: int
    bias: Tensor | None = None

    @property
    def schedule(self) -> tuple[Tensor, int]:
        """Tile schedule and query rows per tile, computed here if there is no schedule yet."""
        if self.tiles is not None:
            return self.tiles, self.block
        rows, heads, head_dim = self.q.shape
        return tiles_of(self.cu_seqlens_q, self.cu_seqlens_k, rows, heads, head_dim, self.max_seqlen_q)

    @property
    def long_schedule(self) -> tuple[Tensor, int]:
        """Tile schedule for the kernel of long segments and query rows per tile, likewise."""
        if self.long_tiles is not None:
            return self.long_tiles, self.long_block
        rows, heads, head_dim = self.q.shape
        return long_tiles_of(self.cu_seqlens_q, rows, heads, head_dim, self.max_seqlen_q)

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys have the same segments."""
        return self.cu_seqlens_k.data_ptr() == self.cu_seqlens_q.data_ptr()

    @property
    def is_aligned(self) -> bool:
        """True if channels are contiguous, and heads and rows begin at multiples of 16 bytes."""
        step = 16 // self.q.element_size()
        return all(
            x.data_ptr() % 16 == 0
            and x.stride(2) == 1
            and all(x.shape[dim] <= 1 or x.stride(dim) % step == 0 for dim in (0, 1))
            for x in (self.q, self.k, self.v)
        )

    def with_long_segments(self) -> "AttentionInputs":
        """Return the same self-attention with the longest segments allowed: captures use many short ones."""
        boundary = torch.arange(self.cu_seqlens_q.shape[0], device=self.q.device)
        cu_seqlens = (boundary * self.max_seqlen_q).clamp(max=self.q.shape[0]).int()
        long = self._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, tiles=None, long_tiles=None)
        tiles, block = long.schedule
        long = long._replace(tiles=tiles, block=block)
        if self.long_tiles is None:
            return long
        tiles, block = long.long_schedule
        return long._replace(long_tiles=tiles, long_block=block)

    def squares(self) -> float:
        """Return the sum of the squared lengths of query segments. Syncs with the device."""
        return float(self.cu_seqlens_q.double().diff().square().sum().item())
