"""Residual sum followed by layer norm in plain torch operations: the specification."""

import torch.nn.functional as F
from torch import Tensor


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + delta`, `[rows, dim]`, and its layer norm over the last dimension, both contiguous.

    All tensors have the same float dtype; `bias` may be `None`. The norm is computed from the rounded sum.
    """
    total = (x + delta).contiguous()
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)
