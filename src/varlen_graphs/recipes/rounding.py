"""The error of rounding, by which recipes tell outputs that are equal."""

import torch
from torch import Tensor

from varlen_graphs.capture.ambient import autocast_dtype
from varlen_graphs.checks.error import relative_error


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error that rounding may cause in a computation, which autocast may run in another dtype."""
    return float(max(torch.finfo(one).eps for one in (dtype, autocast_dtype(device.type)) if one is not None) ** 0.5)


def difference(one: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> float | None:
    """Return the relative L2 error of a tensor if it is more than rounding in a dtype, by default its own. Syncs.

    Tensors of another shape, and integers or flags that differ, have an infinite one.
    """
    error = relative_error(one, other)
    allowed = rounding(dtype or other.dtype, other.device) if other.is_floating_point() else 0.0
    return None if error <= allowed else error
