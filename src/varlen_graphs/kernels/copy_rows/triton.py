"""Copy of rows from an address, and zeros as padding, as a Triton kernel."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Number of integers of 8 bytes that a program writes at a time."""

MOST_PROGRAMS = 1056
"""Number of programs, at most, eight for each multiprocessor of a large GPU. Each writes several blocks if need be."""


def copy_rows(source: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Run `reference.copy_rows` in one launch."""
    units, width = rows.view(-1).view(torch.int64), math.prod(rows.shape[1:]) * rows.itemsize // 8
    programs = max(1, min(-(-len(units) // BLOCK), MOST_PROGRAMS))
    launch(
        _copy_rows, (programs,), source, indices, units, len(units), WIDTH=width, INDICES=len(indices) > 0, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["units"])
def _copy_rows(p_source, p_indices, p_rows, units, WIDTH: tl.constexpr, INDICES: tl.constexpr, BLOCK: tl.constexpr):
    p_memory = tl.load(p_source).to(tl.pointer_type(tl.int64))
    count = tl.load(p_source + 1) * WIDTH
    scattered = tl.load(p_source + 2) != 0
    padding = tl.load(p_source + 3) * WIDTH
    for start in range(tl.program_id(0) * BLOCK, units, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        m = i < count
        from_i = i
        if INDICES:  # noqa: SIM102 - a constant: without indices there is no such code
            if scattered:
                row = i // WIDTH
                from_i = tl.load(p_indices + row, mask=m, other=0) * WIDTH + i - row * WIDTH
        tl.store(p_rows + i, tl.load(p_memory + from_i, mask=m, other=0), mask=m | ((i >= padding) & (i < units)))
