"""Elementwise part of SwiGLU in plain torch operations: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[rows, dim]`, contiguous: computed in float32, rounded once to their common dtype."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()
