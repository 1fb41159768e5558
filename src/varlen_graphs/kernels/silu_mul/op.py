"""Elementwise part of SwiGLU as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.operator import operator
from varlen_graphs.kernels.silu_mul import reference


def _cuda(gate: Tensor, up: Tensor) -> Tensor:
    from varlen_graphs.kernels.silu_mul import triton

    if gate.dtype == torch.float64:
        return reference.silu_mul(gate, up)
    return triton.silu_mul(gate.contiguous(), up.contiguous())


silu_mul = operator(reference.silu_mul, cuda=_cuda)
