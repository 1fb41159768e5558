"""Relative error of tensors."""

import torch
from torch import Tensor


def relative_error(one: Tensor, other: Tensor) -> float:
    """Return the relative L2 error of a tensor; `other` is right. Syncs.

    Non-finite numbers that agree count as equal. Other ones, integers and flags that differ, and other shapes are an
    infinite error.
    """
    if one.shape != other.shape:
        return torch.inf
    if not (other.is_floating_point() or other.is_complex()):
        return torch.inf if bool((one != other).any()) else 0.0
    wide = torch.complex128 if other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    if bool((differ & ~(a.isfinite() & b.isfinite())).any()):
        return torch.inf
    error = torch.where(differ, a - b, 0).norm() / torch.where(b.isfinite(), b, 0).norm().clamp(min=1e-30)
    return float(error)
