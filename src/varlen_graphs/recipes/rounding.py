"""The error of rounding, by which recipes tell outputs that are equal."""

import torch


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error that rounding may cause in a computation, which autocast may run in another dtype."""
    dtypes = [dtype]
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        dtypes.append(torch.get_autocast_dtype(device.type))
    return float(max(torch.finfo(one).eps for one in dtypes) ** 0.5)
