"""Linear layer followed by GELU in plain torch operations: the specification."""

import torch.nn.functional as F
from torch import Tensor


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu(x @ weight.T + bias)`, `[rows, out]`, with the tanh approximation. All have one float dtype."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
