"""Residual sum followed by RMS norm in plain torch operations: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + delta`, `[rows, dim]`, and its RMS norm over the last dimension, both contiguous.

    All tensors have the same float dtype. The norm is computed from the rounded sum, in float32, and rounded once.
    """
    total = (x + delta).contiguous()
    wide = torch.promote_types(x.dtype, torch.float32)
    return total, F.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)
