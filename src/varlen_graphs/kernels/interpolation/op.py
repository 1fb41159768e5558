"""Resampling of a square table to grids of any size, as torch operators."""

import torch
from torch import Tensor

from varlen_graphs.kernels.interpolation import reference
from varlen_graphs.kernels.operator import launcher, operator


def _fake_taps(
    values: Tensor, rows: int, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[Tensor, Tensor]:
    shape = (rows, 4 if mode == "bilinear" else 16)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.float32)


def _fake(
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


interpolation_taps = operator(
    reference.interpolation_taps, fake=_fake_taps, cuda=launcher(__package__, "interpolation_taps")
)
interpolate = operator(reference.interpolate, fake=_fake, cuda=launcher(__package__, "interpolate"))
