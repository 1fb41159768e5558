"""Pack the real rows of a padded batch, and pad packed rows to a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_graphs.layout.dtypes import as_before, plain
from varlen_graphs.layout.padded import real_rows


def real_places(lengths: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return the places of the real rows of a padded batch among all of its rows, int64 `[rows]`. No sync.

    Args:
        lengths: Number of rows of each item.
        length: Number of rows to which the items are padded.
        device: Where to put the result.
    """
    places = real_rows(torch.tensor(lengths, device="cpu"), length).flatten().nonzero().flatten()
    # Torch's allocator reuses a pinned block only after the copy from it.
    return places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places.to(device)


def pack_rows(batch: Tensor, lengths: Sequence[int], places: Tensor | None = None) -> Tensor:
    """Concatenate the real rows of a padded batch, `[rows, ...]`: one launch, or a view if nothing is padded.

    `places` are the `real_places`, which cost a copy to the device if they are not known yet.
    """
    if min(lengths) == batch.shape[1]:
        return batch.flatten(0, 1)
    if places is None:
        places = real_places(lengths, batch.shape[1], batch.device)
    return as_before(plain(batch).flatten(0, 1).index_select(0, places), batch.dtype)


def pad_rows(rows: Tensor, lengths: Sequence[int], length: int, places: Tensor | None = None) -> Tensor:
    """Pad packed rows to a batch `[batch, length, ...]` with zeros: two launches, or a view if no item is shorter.

    `places` are the `real_places`, which cost a copy to the device if they are not known yet.
    """
    if min(lengths) < length:
        if places is None:
            places = real_places(lengths, length, rows.device)
        bits = plain(rows).view(torch.uint8) if rows.dtype.itemsize == 1 else plain(rows)  # torch copies no float8
        empty = bits.new_zeros(len(lengths) * length, *rows.shape[1:])
        rows = as_before(empty.index_copy(0, places, bits), rows.dtype)
    return rows.view(len(lengths), length, *rows.shape[1:])
