"""Resampling a square table with a filter against aliasing, in plain torch operations: the specification.

Source: torch.nn.functional.interpolate(mode="bilinear", align_corners=False, antialias=True), in closed form. On each
axis a row takes the entries under a triangle around its centre: one entry wide where the table is enlarged, which is
plain bilinear resampling, and as much wider as the table is reduced where it is reduced.
"""

import math

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates, locate


def antialias(
    entries: Tensor, values: Tensor, rows: int, merge: int, accum_dtype: torch.dtype, add: Tensor | None = None
) -> Tensor:
    """The position table resampled to the grid of each item, and added to `add`.

    Args:
        entries: The position table, `[side * side, dim]`, row by row.
        values: An item table, int64 `[items, 3 + columns]`.
        rows: The capacity.
        merge: The rows of a frame come in blocks of `merge * merge`; 1 is raster order.
        accum_dtype: The dtype of weights and products; sums are rounded to it at their end.
        add: `[rows, dim]`, or `None`. What it holds in a row reaches that row alone.

    Returns:
        `[rows, dim]` in the dtype of the table, 0 in padding rows; with `add`, `add + ` that.
    """
    side = math.isqrt(entries.shape[0])
    place, active = coordinates(values, rows, merge), locate(values, rows).active
    y = torch.where(active[:, None], _axis(place.h, place.height, side), 0)
    x = _axis(place.w, place.width, side)
    weights = (y[:, :, None] * x[:, None, :]).flatten(1).to(accum_dtype)
    resampled = (weights @ entries.to(accum_dtype)).to(entries.dtype)
    return resampled if add is None else add + resampled


def _axis(position: Tensor, size: Tensor, side: int) -> Tensor:
    """How much each entry on one axis counts, float32 `[rows, side]`; what lies beyond the border counts nothing."""
    centre = (position.float() + 0.5) * side / size
    support = (side / size.float()).clamp(min=1)
    distance = torch.arange(side, dtype=torch.float32, device=position.device) + 0.5 - centre[:, None]
    weights = (1 - distance.abs() / support[:, None]).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)
