"""Residual sum followed by layer norm as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.layer_norm import reference
from varlen_graphs.kernels.operator import operator


def _cuda(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    from varlen_graphs.kernels.layer_norm import triton

    if x.dtype == torch.float64 or x.shape[1] > triton.MAX_DIM:
        return reference.add_layer_norm(x, delta, weight, bias, eps)
    x, delta = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, delta))
    return triton.add_layer_norm(x, delta, weight, bias, eps)


add_layer_norm = operator(reference.add_layer_norm, cuda=_cuda)
