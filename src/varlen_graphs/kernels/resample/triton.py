"""Resampling of bytes along one axis in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS
from varlen_graphs.kernels.launch import launch

BLOCK = 1024
"""Bytes of the result per program, or more where CUDA allows no grid of so many."""

MOST_BLOCKS = 65535
"""Most programs in the second dimension of a grid."""


@triton.jit(do_not_specialize=["size", "resized", "inner", "taps"])
def resample_kernel(out, pixels, filters, size, resized, inner, taps, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Resample `pixels` `[outer, size, inner]` into `out` `[outer, resized, inner]`; both contiguous."""
    outer = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < resized * inner
    row, column = at // inner, at % inner
    one = filters + row * (taps + 1)
    first = tl.load(one, inside, 0)
    total = tl.full([BLOCK], 1 << (BITS - 1), tl.int32)
    for tap in range(taps):
        entry = tl.minimum(first + tap, size - 1).to(tl.int64)
        pixel = tl.load(pixels + (outer * size + entry) * inner + column, inside, 0)
        total += pixel.to(tl.int32) * tl.load(one + 1 + tap, inside, 0)
    value = tl.minimum(tl.maximum(total >> BITS, 0), 255).to(tl.uint8)
    tl.store(out + outer * resized * inner + at, value, inside)


def resample(pixels: Tensor, filters: Tensor, bits: int) -> Tensor:
    """Compute `reference.resample` in one launch."""
    outer, size, inner = pixels.shape
    resized, taps = filters.shape[0], filters.shape[1] - 1
    out = torch.empty(outer, resized, inner, dtype=torch.uint8, device=pixels.device)
    block = max(BLOCK, triton.next_power_of_2(triton.cdiv(resized * inner, MOST_BLOCKS)))
    launch(resample_kernel, (outer, triton.cdiv(resized * inner, block)),
        out, pixels.contiguous(), filters.contiguous(), size, resized, inner, taps, BITS=bits, BLOCK=block, **OPTIONS,
    )  # fmt: skip
    return out
