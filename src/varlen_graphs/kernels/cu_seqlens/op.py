"""Where segments begin, as a custom operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.cu_seqlens import reference

cu_seqlens = torch.library.custom_op("varlen_graphs::cu_seqlens", reference.cu_seqlens, mutates_args=())


@cu_seqlens.register_fake
def _(values: Tensor, segments: int, by_frame: bool) -> Tensor:
    return values.new_empty(segments + 1, dtype=torch.int32)


@cu_seqlens.register_kernel("cuda")
def _(values: Tensor, segments: int, by_frame: bool) -> Tensor:
    from varlen_graphs.kernels.cu_seqlens import triton

    with torch.cuda.device_of(values):
        return triton.cu_seqlens(values, segments, by_frame)
