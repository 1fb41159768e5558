"""Positions of rows in their items in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates


def positions(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    """Return the coordinates of each row, int64 `[rows, axes]`; 0 in padding."""
    place = coordinates(values, rows, merge)
    return torch.stack([getattr(place, axis) for axis in axes.split()], dim=-1)
