"""Boundaries of segments as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.cu_seqlens import reference
from varlen_graphs.kernels.operator import launcher, operator


def _fake(values: Tensor, segments: int, by_frame: bool, begins: int | None = None) -> Tensor:
    return values.new_empty(segments + 1, dtype=torch.int32)


cu_seqlens = operator(reference.cu_seqlens, fake=_fake, cuda=launcher(__package__, "cu_seqlens"))
