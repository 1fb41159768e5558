"""Overwrite floating padding, for replays that are checked: with NaN and rare numbers, or with other rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_graphs.capture.memory import poison

RARE = (torch.inf, -torch.inf, 1e4, -1e4, 0.0, -1.0, 100.0, 5e4)
"""Numbers in padding, beside NaN, for modules that look for some in all rows. Half precision holds them."""


def poison_floating(tensors: Sequence[Tensor]) -> None:
    """Overwrite floating tensors with NaN and with `RARE` numbers in turn."""
    for tensor in tensors:
        if tensor.is_floating_point():
            poison(tensor)
            if tensor.dtype.itemsize > 1:  # some types of one byte have no infinity
                for at, value in enumerate(RARE, start=1):
                    tensor[at :: len(RARE) + 1].fill_(value)


def repeat_entries(static: Tensor, entries: Tensor) -> None:
    """Overwrite a floating tensor with the entries of another, repeated, from the last to the first. No sync."""
    if static.is_floating_point() and static.dim():
        own = entries.reshape(-1, *static.shape[1:]).to(static)
        static.copy_(own[-1 - torch.arange(len(static), device=own.device) % len(own)])
