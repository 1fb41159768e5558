"""Copies of memory by address, in one launch for all of them."""

import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Number of integers of 8 bytes that a program copies at a time."""

MOST_PROGRAMS = 528
"""Number of programs of a transfer, at most: four for each multiprocessor of a large GPU."""


def transfer_memory(transfers: Tensor, most: int) -> None:
    """Run `reference.transfer_memory` in one launch."""
    programs = max(1, min(-(-most // (8 * BLOCK)), MOST_PROGRAMS))
    launch(_transfer_memory, (len(transfers), programs), transfers, BLOCK=BLOCK)


@triton.jit
def _transfer_memory(p_transfers, BLOCK: tl.constexpr):
    p_transfer = p_transfers + 4 * tl.program_id(0)
    p_source = tl.load(p_transfer).to(tl.pointer_type(tl.int64))
    p_target = tl.load(p_transfer + 1).to(tl.pointer_type(tl.int64))
    size = tl.load(p_transfer + 2)
    tl.debug_barrier()  # all threads of this program have the size before another program may set it to 0
    if tl.atomic_add(p_transfer + 3, 1) == tl.num_programs(1) - 1:
        tl.store(p_transfer + 2, tl.zeros_like(size))
        tl.store(p_transfer + 3, tl.zeros_like(size))
    count = size // 8
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < count
        tl.store(p_target + i, tl.load(p_source + i, mask=m), mask=m)
