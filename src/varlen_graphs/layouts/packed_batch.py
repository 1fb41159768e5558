"""Padded batches packed on their way in, and padded again on their way out."""

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from varlen_graphs.layouts.dtypes import as_before, plain
from varlen_graphs.layouts.items import Layout

Sizes = Sequence[tuple[int, ...]]
"""Size of each item of a padded batch: `(rows,)`, or `(height, width)` in patches for pictures."""


def item_sizes(layout: Layout, dims: int) -> Sizes:
    """Return the sizes of items that are padded in so many dimensions: `(rows,)`, or `(height, width)`."""
    return [(h, w) for _, h, w, *_ in layout.items] if dims == 2 else [(rows,) for rows in layout.rows]


def has_padding(rows: int, items: int, padded: Sequence[int]) -> bool:
    """Return True if some rows of a batch `[items, *padded]` are padding, of which so many are real."""
    return rows < items * math.prod(padded)


class GatherIndices:
    """Indices of the real rows of padded batches among all of their rows, kept on a device. No sync.

    Args:
        device: The device.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: list[tuple[Sizes, tuple[int, ...], Tensor]] = []  # of a few: a dictionary would hash all sizes

    def of(self, sizes: Sizes, padded: Sequence[int]) -> Tensor | None:
        """Return the indices of the real rows of items of these sizes, int64 `[rows]`; `None` if all rows are real.

        Costs one copy to the device, unless these sizes were asked for before.
        """
        most = tuple(padded)
        for own, length, gather_indices in self._known:
            if length == most and (own is sizes or own == sizes):
                return gather_indices
        if sizes.count(most) == len(sizes):
            return None
        gather_indices = torch.from_numpy(real_indices(sizes, padded)).to(self.device, non_blocking=True)
        self._known.append((sizes, most, gather_indices))
        return gather_indices

    def keep(self, sizes: Sizes, padded: Sequence[int], gather_indices: Tensor) -> None:
        """Take the indices of the real rows of items of these sizes from the device, unless all rows are real."""
        if has_padding(len(gather_indices), len(sizes), padded):
            self._known.append((sizes, tuple(padded), gather_indices))


def real_indices(sizes: Sizes, padded: Sequence[int]) -> "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]":
    """Return the indices of the real rows of a batch `[batch, *padded]` among all of its rows, int64 `[rows]`."""
    counts = [numpy.array(along)[:, None] for along in zip(*sizes, strict=True)]
    real = [numpy.arange(most) < own for most, own in zip(padded, counts, strict=True)]
    marks = real[0] if len(real) == 1 else real[0][:, :, None] & real[1][:, None]
    return marks.ravel().nonzero()[0]


def pack_rows(
    batch: Tensor, sizes: Sizes, gather_indices: GatherIndices | None = None, out: Tensor | None = None
) -> Tensor:
    """Concatenate the real rows of a padded batch `[batch, *padded, ...]`, `[rows, ...]`. One launch.

    Args:
        batch: The batch.
        sizes: Size of each item.
        gather_indices: Keeps the indices of real rows, on the device of the batch.
        out: Where to write the rows, cast to its dtype; by default they are new, or a view if nothing is padded.
    """
    dims = len(sizes[0])
    if gather_indices is None or gather_indices.device != batch.device:
        gather_indices = GatherIndices(batch.device)
    real = gather_indices.of(sizes, batch.shape[1 : 1 + dims])
    rows = batch.flatten(0, dims)
    if out is not None and real is not None and (out.dtype, out.device) == (rows.dtype, rows.device):
        torch.index_select(plain(rows), 0, real, out=plain(out))
        return out
    if real is not None:
        rows = as_before(plain(rows).index_select(0, real), batch.dtype)
    return rows if out is None else out.copy_(rows, non_blocking=rows.is_cuda)


def pad_rows(
    rows: Tensor, sizes: Sizes, padded: Sequence[int], gather_indices: GatherIndices | None = None, copies: bool = False
) -> Tensor:
    """Pad packed rows to a batch `[batch, *padded, ...]` with zeros, in two launches.

    If no item is smaller, the batch is a view of the rows, or a copy if `copies`.
    """
    shape = (len(sizes), *padded)
    real = (gather_indices or GatherIndices(rows.device)).of(sizes, padded)
    if real is not None:
        bits = plain(rows).view(torch.uint8) if rows.dtype.itemsize == 1 else plain(rows)  # torch copies no float8
        empty = bits.new_zeros(math.prod(shape), *rows.shape[1:])
        rows = as_before(empty.index_copy_(0, real, bits), rows.dtype)
    elif copies:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(*shape, *rows.shape[1:])
