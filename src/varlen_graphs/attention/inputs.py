"""Inputs of one attention, as backends take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.attention.kernel.config import tile_rows
from varlen_graphs.attention.tile_schedule.op import tile_schedule


class AttentionInputs(NamedTuple):
    """Arguments of one attention; see `varlen_attention`. If `tiles` is `None`, `block` has no meaning."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tiles: Tensor | None
    block: int
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
        block = tile_rows(head_dim, heads, rows, self.max_seqlen_q)
        return tile_schedule(self.cu_seqlens_q, self.cu_seqlens_k, rows, block), block

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys have the same segments."""
        return self.cu_seqlens_k.data_ptr() == self.cu_seqlens_q.data_ptr()

    def with_long_segments(self) -> "AttentionInputs":
        """Return the same self-attention with the longest segments allowed: captures use many short ones."""
        boundary = torch.arange(self.cu_seqlens_q.shape[0], device=self.q.device)
        cu_seqlens = (boundary * self.max_seqlen_q).clamp(max=self.q.shape[0]).int()
        long = self._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, tiles=None)
        tiles, block = long.schedule
        return long._replace(tiles=tiles, block=block)

    def squares(self) -> float:
        """Return the sum of the squared lengths of query segments. Syncs with the device."""
        return float(self.cu_seqlens_q.double().diff().square().sum().item())
