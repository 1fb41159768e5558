"""Padded batches packed on their way in, and padded again on their way out."""

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from varlen_graphs.layout.dtypes import as_before, plain
from varlen_graphs.layout.items import Layout

Sizes = Sequence[tuple[int, ...]]
"""Size of each item of a padded batch: `(rows,)`, or `(height, width)` in patches for pictures."""


def item_sizes(layout: Layout, padded: Sequence[int]) -> Sizes:
    """Return the sizes of items that are padded to `padded`, `(length,)` or `(height, width)`."""
    return [(h, w) for _, h, w, *_ in layout.items] if len(padded) == 2 else [(rows,) for rows in layout.rows]


class Places:
    """Places of the real rows of padded batches among all of their rows, kept on a device. No sync.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[tuple[int, ...], ...], Tensor] = {}

    def of(self, sizes: Sizes, padded: Sequence[int]) -> Tensor | None:
        """Return the places of items of these sizes, padded to `padded`, int64 `[rows]`; `None` if all rows are real.

        Costs one copy to the device, unless these sizes were asked for before.
        """
        key = (*sizes, tuple(padded))
        if key not in self._known:
            if all(size == key[-1] for size in sizes):
                return None
            places = torch.from_numpy(numpy.flatnonzero(_are_real(sizes, padded)))
            self._known[key] = places.to(self._device, non_blocking=True)
        return self._known[key]


def _are_real(sizes: Sizes, padded: Sequence[int]) -> "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.bool_]]":
    """Return the mask of real rows, bool `[batch, *padded]`."""
    counts = numpy.array(sizes)
    real = numpy.arange(padded[0]) < counts[:, :1]
    for dim, size in enumerate(padded[1:], start=1):
        real = real[..., None] & (numpy.arange(size) < counts[:, dim].reshape(-1, *[1] * (dim + 1)))
    return real


def pack_rows(batch: Tensor, sizes: Sizes, places: Places | None = None) -> Tensor:
    """Concatenate the real rows of a padded batch `[batch, *padded, ...]`, `[rows, ...]`.

    One launch, or a view if nothing is padded.
    """
    dims = len(sizes[0])
    real = (places or Places(batch.device)).of(sizes, batch.shape[1 : 1 + dims])
    rows = batch.flatten(0, dims)
    return rows if real is None else as_before(plain(rows).index_select(0, real), batch.dtype)


def pad_rows(rows: Tensor, sizes: Sizes, padded: Sequence[int], places: Places | None = None) -> Tensor:
    """Pad packed rows to a batch `[batch, *padded, ...]` with zeros: two launches, or a view if no item is smaller."""
    shape = (len(sizes), *padded)
    real = (places or Places(rows.device)).of(sizes, padded)
    if real is not None:
        bits = plain(rows).view(torch.uint8) if rows.dtype.itemsize == 1 else plain(rows)  # torch copies no float8
        empty = bits.new_zeros(math.prod(shape), *rows.shape[1:])
        rows = as_before(empty.index_copy(0, real, bits), rows.dtype)
    return rows.view(*shape, *rows.shape[1:])
