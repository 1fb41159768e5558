"""The rotation of queries and keys, as an operator of torch."""

import torch
from torch import Tensor

from varlen_graphs.kernels.rotary import reference


@torch.library.custom_op("varlen_graphs::apply_rotary", mutates_args=())
def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.apply_rotary`."""
    if not q.is_cuda or q.dtype == torch.float64:
        return reference.apply_rotary(q, k, cos, sin)
    from varlen_graphs.kernels.rotary import triton

    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    return triton.apply_rotary(q, k, cos, sin)


@apply_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))  # type: ignore[return-value]
