"""Antialiased resampling of a square table in plain torch operations: the specification.

Source: torch.nn.functional.interpolate(mode="bilinear", align_corners=False, antialias=True), in closed form. On each
axis a row averages the entries under a triangle around its centre. Upsampling has a triangle with a support of one
entry to each side, which is plain bilinear resampling; downsampling widens it by the scale factor.
"""

import math

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates, locate


def antialias(
    entries: Tensor, values: Tensor, rows: int, merge: int, accum_dtype: torch.dtype, add: Tensor | None = None
) -> Tensor:
    """Resample the table `entries`, `[side * side, dim]` in raster order, to the grid of each item.

    Weights and products have the dtype `accum_dtype`; each sum is rounded to it once, at its end. The result,
    `[rows, dim]`, is 0 in padding rows and has the dtype of the table. With `add`, `[rows, dim]`, it is the sum
    with it, row by row, in the promoted dtype.
    """
    side = math.isqrt(entries.shape[0])
    place, active = coordinates(values, rows, merge), locate(values, rows).active
    y = torch.where(active[:, None], _axis(place.h, place.height, side), 0)
    x = _axis(place.w, place.width, side)
    weights = (y[:, :, None] * x[:, None, :]).flatten(1).to(accum_dtype)
    resampled = (weights @ entries.to(accum_dtype)).to(entries.dtype)
    return resampled if add is None else add + resampled


def _axis(position: Tensor, size: Tensor, side: int) -> Tensor:
    """Return the weight of each entry on one axis, float32 `[rows, side]`; each row sums to one."""
    centre = (position.float() + 0.5) * side / size
    support = (side / size.float()).clamp(min=1)
    distance = torch.arange(side, dtype=torch.float32, device=position.device) + 0.5 - centre[:, None]
    weights = (1 - distance.abs() / support[:, None]).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)
