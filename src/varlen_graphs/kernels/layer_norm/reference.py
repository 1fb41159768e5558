"""Residual sum followed by layer norm in plain torch operations: the specification."""

import torch.nn.functional as F
from torch import Tensor


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + delta`, and its layer norm over the last dimension.

    Args:
        x: `[rows, dim]`, any float dtype.
        delta: `[rows, dim]`, dtype of `x`.
        weight: `[dim]`, dtype of `x`.
        bias: `[dim]`, dtype of `x`.
        eps: Added to the variance.

    Returns:
        The sum and its norm, `[rows, dim]` each in the dtype of `x`, contiguous.
        The norm is computed from the rounded sum.
    """
    total = (x + delta).contiguous()
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)
