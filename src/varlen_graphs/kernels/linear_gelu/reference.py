"""Linear layer followed by GELU in plain torch operations: the specification."""

import torch.nn.functional as F
from torch import Tensor


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu(x @ weight.T + bias)` with the tanh approximation.

    Args:
        x: `[rows, features]`, any float dtype.
        weight: `[out, features]`, dtype of `x`.
        bias: `[out]`, dtype of `x`.

    Returns:
        `[rows, out]` in the dtype of `x`.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
