"""Elementwise part of SwiGLU in plain torch operations: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `[rows, dim]`, any float dtype.
        up: `[rows, dim]`, dtype of `gate`.

    Returns:
        `[rows, dim]`, dtype of `gate`, contiguous.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()
