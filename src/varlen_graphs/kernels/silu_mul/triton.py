"""Elementwise part of SwiGLU in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Elements per program."""


@triton.jit
def _silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(gate + at, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=here)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `reference.silu_mul` in one launch. Both inputs must be contiguous."""
    out = torch.empty_like(gate)
    if gate.numel():
        launch(_silu_mul, (triton.cdiv(gate.numel(), BLOCK),), gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out
