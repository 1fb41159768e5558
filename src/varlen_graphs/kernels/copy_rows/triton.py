"""Copy of rows from an address, as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Number of integers of 8 bytes that a program copies at a time."""

MOST_PROGRAMS = 1056
"""Number of programs, at most, eight for each multiprocessor of a large GPU. Each copies several blocks if need be."""


def copy_rows(source: Tensor, rows: Tensor) -> None:
    """Run `reference.copy_rows` in one launch."""
    blocks = -(-rows.nbytes // (8 * BLOCK))
    launch(_copy_rows, (max(1, min(blocks, MOST_PROGRAMS)),), source, rows.view(-1).view(torch.int64), BLOCK=BLOCK)


@triton.jit
def _copy_rows(p_source, p_rows, BLOCK: tl.constexpr):
    p_memory = tl.load(p_source).to(tl.pointer_type(tl.int64))
    count = tl.load(p_source + 1) // 8
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < count
        tl.store(p_rows + i, tl.load(p_memory + i, mask=m), mask=m)
