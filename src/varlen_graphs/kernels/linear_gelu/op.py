"""Linear layer followed by GELU as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.linear_gelu import reference
from varlen_graphs.kernels.operator import operator


def _cuda(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run cuBLAS, which applies the GELU to the products before they are rounded and written."""
    out: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return out


linear_gelu = operator(reference.linear_gelu, cuda=_cuda)
