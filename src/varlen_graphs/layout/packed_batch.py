"""Padded batches packed on their way in, and padded again on their way out."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from varlen_graphs.layout.dtypes import as_before, plain
from varlen_graphs.layout.items import Layout

Sizes = Sequence[tuple[int, ...]]
"""Size of each item of a padded batch: `(rows,)`, or `(height, width)` in patches for pictures."""


def item_sizes(layout: Layout, padded: Sequence[int]) -> Sizes:
    """Return the sizes of items that are padded to `padded`, `(length,)` or `(height, width)`."""
    return [(h, w) for _, h, w, *_ in layout.items] if len(padded) == 2 else [(rows,) for rows in layout.rows]


def pack_rows(batch: Tensor, sizes: Sizes) -> Tensor:
    """Concatenate the real rows of a padded batch `[batch, *padded, ...]`, `[rows, ...]`.

    One launch for a batch of sequences, or a view if nothing is padded.
    """
    dims = len(sizes[0])
    if all(size == batch.shape[1 : 1 + dims] for size in sizes):
        return batch.flatten(0, dims)
    items = [_real(item, size).flatten(0, dims - 1) for item, size in zip(plain(batch), sizes, strict=True)]
    return as_before(torch.cat(items), batch.dtype)


def pad_rows(rows: Tensor, sizes: Sizes, padded: Sequence[int]) -> Tensor:
    """Pad packed rows to a batch `[batch, *padded, ...]` with zeros.

    Two launches for a batch of sequences, or a view if no item is smaller.
    """
    shape = (len(sizes), *padded, *rows.shape[1:])
    if all(size == tuple(padded) for size in sizes):
        return rows.view(shape)
    items = [item.unflatten(0, size) for item, size in zip(rows.split([*map(math.prod, sizes)]), sizes, strict=True)]
    if rows.requires_grad and torch.is_grad_enabled():  # the copies below have no gradient
        inner = (0, 0) * (rows.dim() - 1)
        return torch.stack([F.pad(item, (*inner, *_missing(item, padded))) for item in items])
    batch = plain(rows).new_zeros(shape)
    real = [_real(one, size) for one, size in zip(batch, sizes, strict=True)]
    torch._foreach_copy_(real, [plain(item) for item in items])
    return batch.view(rows.dtype)


def _real(item: Tensor, size: Sequence[int]) -> Tensor:
    """Return a view of the real rows of a padded item."""
    return item[tuple([slice(own) for own in size])]


def _missing(item: Tensor, padded: Sequence[int]) -> list[int]:
    """Return the rows that an item lacks before and after it in each dimension, the last dimension first."""
    lacking = [size - own for size, own in zip(padded, item.shape, strict=False)]
    return [number for last in reversed(lacking) for number in (0, last)]
