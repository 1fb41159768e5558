"""A residual sum and the layer norm after it, as an operator of torch."""

import torch
from torch import Tensor

from varlen_graphs.kernels.layer_norm import reference


@torch.library.custom_op("varlen_graphs::add_layer_norm", mutates_args=())
def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_layer_norm`."""
    if not x.is_cuda or x.dtype == torch.float64:
        return reference.add_layer_norm(x, delta, weight, bias, eps)
    from varlen_graphs.kernels.layer_norm import triton

    if x.shape[1] > triton.MAX_DIM:
        return reference.add_layer_norm(x, delta, weight, bias, eps)
    x, delta = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, delta))
    return triton.add_layer_norm(x, delta, weight, bias, eps)


@add_layer_norm.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(
        x, memory_format=torch.contiguous_format
    )
