"""Cosines and sines of rotary position embedding as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.rotary_table import reference


def _fake(values: Tensor, rows: int, inv_freq: Tensor, axes: str, merge: int, side: int = 0) -> tuple[Tensor, Tensor]:
    shape = (rows, 2 * len(axes.split()) * inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=torch.float32), inv_freq.new_empty(shape, dtype=torch.float32)


rotary_table = operator(reference.rotary_table, fake=_fake, cuda=launcher(__package__, "rotary_table"))
