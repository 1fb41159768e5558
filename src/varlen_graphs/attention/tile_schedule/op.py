"""Tile schedule as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.attention.tile_schedule import reference
from varlen_graphs.kernels.operator import launcher, operator


def _fake(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rows: int, block: int) -> Tensor:
    tiles = reference.tile_bound(rows, cu_seqlens_q.shape[0] - 1, block)
    return torch.empty((1 + tiles, 5), dtype=torch.int32, device=cu_seqlens_q.device)


tile_schedule = operator(reference.tile_schedule, fake=_fake, cuda=launcher(__package__, "tile_schedule"))
