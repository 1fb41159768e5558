"""Where rows lie in their items, as a custom operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.positions import reference

positions = torch.library.custom_op("varlen_graphs::positions", reference.positions, mutates_args=())


@positions.register_fake
def _(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    return values.new_empty(rows, len(axes.split()))


@positions.register_kernel("cuda")
def _(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    from varlen_graphs.kernels.positions import triton

    with torch.cuda.device_of(values):
        return triton.positions(values, rows, axes, merge)
