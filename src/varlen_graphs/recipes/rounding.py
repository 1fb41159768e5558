"""The error of rounding, by which recipes tell outputs that are equal."""

import torch

from varlen_graphs.capture.ambient import autocast_dtype


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error that rounding may cause in a computation, which autocast may run in another dtype."""
    return float(max(torch.finfo(one).eps for one in (dtype, autocast_dtype(device.type)) if one is not None) ** 0.5)
