"""A linear layer and the GELU after it, in plain torch operations: the specification."""

import torch.nn.functional as F
from torch import Tensor


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`gelu(x @ weight.T + bias)`, in the approximation by tanh.

    Args:
        x: `[rows, features]`, any float dtype.
        weight: `[out, features]`, dtype of `x`.
        bias: `[out]`, dtype of `x`.

    Returns:
        `[rows, out]`.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
