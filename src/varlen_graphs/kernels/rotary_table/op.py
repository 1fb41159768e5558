"""The cosines and sines of rotary position embedding, as a custom operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.rotary_table import reference

rotary_table = torch.library.custom_op("varlen_graphs::rotary_table", reference.rotary_table, mutates_args=())


@rotary_table.register_fake
def _(values: Tensor, rows: int, inv_freq: Tensor, axes: str, merge: int) -> tuple[Tensor, Tensor]:
    shape = (rows, 2 * len(axes.split()) * inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=torch.float32), inv_freq.new_empty(shape, dtype=torch.float32)


@rotary_table.register_kernel("cuda")
def _(values: Tensor, rows: int, inv_freq: Tensor, axes: str, merge: int) -> tuple[Tensor, Tensor]:
    from varlen_graphs.kernels.rotary_table import triton

    with torch.cuda.device_of(values):
        return triton.rotary_table(values, rows, inv_freq, axes, merge)
