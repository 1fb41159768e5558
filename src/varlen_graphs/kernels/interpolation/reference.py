"""Resampling of a square table to grids of any size in plain torch operations: the specification.

Sources: torch.nn.functional.interpolate and grid_sample (border), in closed form; for bicubic the convolution kernel of
Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.75.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates

Mode = Literal["bilinear", "bicubic"]

CUBIC = -0.75


def interpolation_taps(
    values: Tensor, rows: int, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[Tensor, Tensor]:
    """Return the table entries that each row is computed from, and their weights.

    The table has `side * side` entries in raster order. With `align_corners`, the corner rows of the grid lie on its
    corner entries; otherwise positions are pixel centres (`+ 0.5`). Taps beyond the border repeat it. A padding row
    counts as the only row of a 1 x 1 grid: it reads the middle of the table, or with `align_corners` the first entry.

    Returns:
        Indices of entries, int64 `[rows, taps]`, and weights, float32 `[rows, taps]`: 4 taps bilinear, 16 bicubic.
    """
    place = coordinates(values, rows, merge)
    y, y_weights = _axis(place.h, place.height, side, mode, align_corners)
    x, x_weights = _axis(place.w, place.width, side, mode, align_corners)
    indices = y[:, :, None] * side + x[:, None, :]
    return indices.flatten(1), (y_weights[:, :, None] * x_weights[:, None, :]).flatten(1)


def _axis(position: Tensor, size: Tensor, side: int, mode: str, align_corners: bool) -> tuple[Tensor, Tensor]:
    """Return the taps on one axis, int64 `[rows, 2 or 4]`, and their weights."""
    p = position.float()
    source = p * (side - 1) / (size - 1).clamp(min=1) if align_corners else (p + 0.5) * side / size - 0.5
    floor = source.floor()
    f = source - floor
    if mode == "bilinear":
        weights = {0: 1 - f, 1: f}
    else:
        weights = {-1: _far(f + 1), 0: _near(f), 1: _near(1 - f), 2: _far(2 - f)}
    taps = torch.stack([(floor.long() + step).clamp(0, side - 1) for step in weights], dim=1)
    return taps, torch.stack(list(weights.values()), dim=1)


def _near(d: Tensor) -> Tensor:
    """Evaluate Keys' kernel at a distance of at most 1."""
    return ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1


def _far(d: Tensor) -> Tensor:
    """Evaluate Keys' kernel at a distance from 1 to 2."""
    return ((CUBIC * d - 5 * CUBIC) * d + 8 * CUBIC) * d - 4 * CUBIC


def interpolate(
    entries: Tensor, values: Tensor, rows: int, mode: str, align_corners: bool, merge: int, accum_dtype: torch.dtype,
    add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Resample the table `entries`, `[side * side, dim]`, to the grid of each item, as in `interpolation_taps`.

    Sums one tap after the other, to avoid a `[rows, taps, dim]` temporary. Weights, products and sums have the dtype
    `accum_dtype`: float32 is exact; the dtype of the table reproduces transformers before 5.9 and vLLM. The result,
    `[rows, dim]`, has the dtype of the table. With `add`, `[rows, dim]`, it is the sum with it, row by row, in the
    promoted dtype.
    """
    indices, weights = interpolation_taps(values, rows, math.isqrt(entries.shape[0]), mode, align_corners, merge)
    weights = weights.to(accum_dtype)
    total = entries[indices[:, 0]].to(accum_dtype) * weights[:, :1]
    for tap in range(1, indices.shape[1]):
        total = total + entries[indices[:, tap]].to(accum_dtype) * weights[:, tap : tap + 1]
    resampled = total.to(entries.dtype)
    return resampled if add is None else add + resampled
