"""Residual sum followed by layer norm in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

MAX_DIM = 8192
"""Largest row that one program keeps in registers."""


@triton.jit
def _add_layer_norm(
    x, delta, weight, bias, total, normed, eps, X_ROW, DELTA_ROW, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    kind = total.dtype.element_ty
    a = tl.load(x + row * X_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(delta + row * DELTA_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (a + b).to(kind)
    tl.store(total + row * DIM + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    mean = tl.sum(value, 0) / DIM
    centred = tl.where(inside, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / DIM + eps)
    value = centred * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * DIM + columns, value.to(kind), mask=inside)


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `reference.add_layer_norm` of rows up to `MAX_DIM` with contiguous channels, one program per row."""
    rows, dim = x.shape
    total, normed = (torch.empty((rows, dim), dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        block = triton.next_power_of_2(dim)
        launch(_add_layer_norm, (rows,),
            x, delta, weight, bias, total, normed, eps, x.stride(0), delta.stride(0), DIM=dim, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return total, normed
