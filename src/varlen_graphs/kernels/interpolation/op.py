"""Resampling a square table to grids of any size, as custom operators."""

import torch
from torch import Tensor

from varlen_graphs.kernels.interpolation import reference

interpolation_taps = torch.library.custom_op(
    "varlen_graphs::interpolation_taps", reference.interpolation_taps, mutates_args=()
)

interpolate = torch.library.custom_op("varlen_graphs::interpolate", reference.interpolate, mutates_args=())


@interpolation_taps.register_fake
def _(values: Tensor, rows: int, side: int, mode: str, align_corners: bool, merge: int) -> tuple[Tensor, Tensor]:
    shape = (rows, 4 if mode == "bilinear" else 16)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.float32)


@interpolation_taps.register_kernel("cuda")
def _(values: Tensor, rows: int, side: int, mode: str, align_corners: bool, merge: int) -> tuple[Tensor, Tensor]:
    from varlen_graphs.kernels.interpolation import triton

    with torch.cuda.device_of(values):
        return triton.interpolation_taps(values, rows, side, mode, align_corners, merge)


@interpolate.register_fake
def _(
    entries: Tensor,
    values: Tensor,
    rows: int,
    mode: str,
    align_corners: bool,
    merge: int,
    accum_dtype: torch.dtype,
    add: Tensor | None = None,
) -> Tensor:
    dtype = entries.dtype if add is None else torch.promote_types(entries.dtype, add.dtype)
    return entries.new_empty(rows, entries.shape[1], dtype=dtype)


@interpolate.register_kernel("cuda")
def _(
    entries: Tensor,
    values: Tensor,
    rows: int,
    mode: str,
    align_corners: bool,
    merge: int,
    accum_dtype: torch.dtype,
    add: Tensor | None = None,
) -> Tensor:
    from varlen_graphs.kernels.interpolation import triton

    with torch.cuda.device_of(values):
        return triton.interpolate(entries, values, rows, mode, align_corners, merge, accum_dtype, add)
