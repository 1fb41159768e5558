"""Patches of images in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.kernels.items.triton import OPTIONS, grid_position, locate
from varlen_graphs.kernels.launch import launch

ROWS = 4
"""Rows per program."""


@triton.jit(do_not_specialize=["item_stride", "column_stride", "items", "rows"])
def patches_kernel(
    out, values, images, constants, item_stride, column_stride, items, rows,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, FRAMES: tl.constexpr, MERGE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write `out`, `[rows, channels * frames * size * size]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, height, width = locate(row, values, item_stride, column_stride, items)
    t, h, w = grid_position(within, height, width, MERGE)
    first = (row - within).to(tl.int64) + t.to(tl.int64) * height * width
    pixel = tl.arange(0, PIXELS)
    y, x = pixel // SIZE, pixel % SIZE
    in_image = (h[:, None] * SIZE + y[None, :]).to(tl.int64) * (width[:, None] * SIZE) + w[:, None] * SIZE + x[None, :]
    place = first[:, None] * (SIZE * SIZE) + in_image
    inside = (row < rows)[:, None] & (pixel < SIZE * SIZE)[None, :]
    # Whatever the table holds, nothing beside the images is read.
    there = inside & (place >= 0) & (place < rows.to(tl.int64) * (SIZE * SIZE))
    to = out + row[:, None].to(tl.int64) * (CHANNELS * FRAMES * SIZE * SIZE) + pixel[None, :]
    for channel in tl.static_range(CHANNELS):
        found = tl.load(images + place * CHANNELS + channel, there, 0).to(tl.float32)
        normal = found * tl.load(constants + channel) + tl.load(constants + CHANNELS + channel)
        for frame in tl.static_range(FRAMES):
            tl.store(to + (channel * FRAMES + frame) * (SIZE * SIZE), normal.to(out.dtype.element_ty), inside)


def patches(
    values: Tensor, images: Tensor, constants: Tensor, size: int, frames: int, merge: int, dtype: torch.dtype
) -> Tensor:
    """Compute `reference.patches` in one launch."""
    rows, channels = images.shape[0], constants.shape[1]
    images = images.contiguous()
    out = torch.empty(rows, channels * frames * size * size, dtype=dtype, device=images.device)
    launch(patches_kernel, (triton.cdiv(rows, ROWS),),
        out, values, images, constants, *values.stride(), values.shape[0], rows, CHANNELS=channels, SIZE=size,
        PIXELS=triton.next_power_of_2(size * size), FRAMES=frames, MERGE=merge, ROWS=ROWS, **OPTIONS,
    )  # fmt: skip
    return out
