"""The outputs of one rank in one block of memory."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from varlen_graphs.layouts.dtypes import plain
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import Parts

ALIGNMENT = 16
"""Alignment of every tensor, in bytes, which its dtype may require."""


class Block:
    """Memory for the outputs of some items, uint8 `[bytes]`, to be sent as a whole; `form` gives dtypes and shapes."""

    def __init__(self, form: Parts, part: Layout, device: torch.device) -> None:
        item_slice = ItemSlice.of(part)
        shapes = [e.resize(like.shape, e.size(item_slice)) for like, e in zip(form.tensors, form.extents, strict=True)]
        sizes = [prod(shape) * like.dtype.itemsize for shape, like in zip(shapes, form.tensors, strict=True)]
        self.memory = torch.empty(sum(map(_aligned, sizes)) + 1, dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = []  # the outputs, views of the block
        start = 0
        for like, shape, size in zip(form.tensors, shapes, sizes, strict=True):
            self.tensors.append(self.memory[start : start + size].view(like.dtype).view(shape))
            start += _aligned(size)
        self.failed = self.memory[start:]  # [1]: 1 if the rank that filled the block failed

    def fill(self, outputs: Sequence[Tensor] | None) -> None:
        """Copy outputs into the block; `None` fills it with NaN, or with zeros if not floating. No sync."""
        self.failed.fill_(outputs is None)
        if outputs is not None:
            torch._foreach_copy_([*map(plain, self.tensors)], [*map(plain, outputs)])
            return
        for tensor in self.tensors:
            plain(tensor).fill_(torch.nan if tensor.is_floating_point() and plain(tensor) is tensor else 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
