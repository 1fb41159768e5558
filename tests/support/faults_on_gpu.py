"""Faults that CUDA answers by failing every later use of it in the process."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write(start, at):
    tl.store(start + at, 1)


def assertion():
    """Look up an index that is out of range, which an assertion on the GPU finds."""
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]


def illegal_access():
    """Write far from any memory."""
    _write[(1,)](torch.zeros(2, dtype=torch.int32, device="cuda"), 1 << 40)
