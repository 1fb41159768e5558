"""One attention, as backends take it."""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.attention.config import tile_rows
from varlen_graphs.attention.tile_schedule.op import tile_schedule


class Call(NamedTuple):
    """The arguments of one attention; see `varlen_graphs.varlen_attention`. Without `tiles`, `block` means nothing."""

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

    @property
    def schedule(self) -> tuple[Tensor, int]:
        """The tile schedule, computed if there is none, and the query rows a tile."""
        if self.tiles is not None:
            return self.tiles, self.block
        rows, heads, head_dim = self.q.shape
        block = tile_rows(head_dim, heads, rows, self.max_seqlen_q)
        return tile_schedule(self.cu_seqlens_q, self.cu_seqlens_k, rows, block), block

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are cut into the same segments."""
        return self.cu_seqlens_k.data_ptr() == self.cu_seqlens_q.data_ptr()

    def with_long_segments(self) -> "Call":
        """The same self-attention with segments as long as they may be: graphs are captured with many short ones."""
        boundary = torch.arange(self.cu_seqlens_q.shape[0], device=self.q.device)
        cu_seqlens = (boundary * self.max_seqlen_q).clamp(max=self.q.shape[0]).int()
        long = self._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, tiles=None)
        tiles, block = long.schedule
        return long._replace(tiles=tiles, block=block)

    def squares(self) -> float:
        """The sum of the squared lengths of query segments. Synchronizes with the device."""
        return float(self.cu_seqlens_q.double().diff().square().sum().item())
