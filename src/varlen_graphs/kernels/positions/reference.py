"""Positions of rows in their items in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates


def positions(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    """Return the coordinates of each row; 0 in padding.

    Args:
        values: An item table, int64 `[items, 3 + columns]`.
        rows: Rows of the budget, padding included.
        axes: Names of the coordinates, separated by spaces: `"t"`, `"h"`, `"w"` and `"row"` (the index in the item).
        merge: The rows of a frame are ordered in blocks of `merge * merge`; 1 is raster order.

    Returns:
        int64 `[rows, axes]`.
    """
    place = coordinates(values, rows, merge)
    return torch.stack([getattr(place, axis) for axis in axes.split()], dim=-1)
