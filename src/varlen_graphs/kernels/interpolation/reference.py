"""Resampling a square table to grids of any size, in plain torch operations: the specification."""

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["bilinear"]


def interpolation_taps(
    position: tuple[Tensor, Tensor], size: tuple[Tensor, Tensor], side: int, mode: Mode, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Which entries of the table each row is made of, and with what weights.

    Args:
        position: Row and column of each row in its grid, int64 `[rows]` each.
        size: Height and width of the grid of each row, int64 `[rows]` each, at least 1.
        side: The table is `side * side` entries, row by row.
        mode: `"bilinear"`, four taps.
        align_corners: True: the corners of grid and table coincide. False: pixel centres do (`+ 0.5`), and taps beyond
            the border repeat it.

    Returns:
        Indices into the table, int64 `[rows, taps]`, and weights, float32 `[rows, taps]`.

    Source: torch.nn.functional.interpolate, in closed form.
    """
    (y0, y1, fy), (x0, x1, fx) = (_axis(p, s, side, align_corners) for p, s in zip(position, size, strict=True))
    indices = torch.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1], dim=1)
    weights = torch.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx], dim=1)
    return indices, weights


def _axis(position: Tensor, size: Tensor, side: int, align_corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The two neighbours on one axis, and how far the second one counts."""
    p = position.float()
    source = p * (side - 1) / (size - 1).clamp(min=1) if align_corners else (p + 0.5) * side / size - 0.5
    floor = source.floor()
    first = floor.long()
    return first.clamp(0, side - 1), (first + 1).clamp(0, side - 1), source - floor


def interpolate(table: Tensor, indices: Tensor, weights: Tensor, accum_dtype: torch.dtype) -> Tensor:
    """Weighted sums of table entries, one tap after the other, so that no `[rows, taps, dim]` temporary is made.

    Args:
        table: `[entries, dim]`.
        indices: int64 `[rows, taps]`.
        weights: float32 `[rows, taps]`.
        accum_dtype: The dtype of weights, products and sums. float32 is exact; the table's own dtype repeats what
            transformers before 5.9 and vLLM do.

    Returns:
        `[rows, dim]` in the dtype of the table.
    """
    weights = weights.to(accum_dtype)
    total = table[indices[:, 0]].to(accum_dtype) * weights[:, :1]
    for tap in range(1, indices.shape[1]):
        total = total + table[indices[:, tap]].to(accum_dtype) * weights[:, tap : tap + 1]
    return total.to(table.dtype)
