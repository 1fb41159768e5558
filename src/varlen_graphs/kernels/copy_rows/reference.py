"""Copy of rows from an address, and zeros as padding, on the host: the specification."""

from ctypes import c_uint8
from math import prod

import torch
from torch import Tensor


def copy_rows(source: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Copy rows from an address: adjoining ones, or those at some places. Write zeros into the padding past all rows.

    Whoever writes the address vouches for the memory there, until the copy has run.

    Args:
        source: int64 `[4]`: address of the first row, a multiple of 8, on the device of `rows`; number of rows to copy,
            at most that of `rows`; 1 if they are those at `indices`, and 0 if they are the first ones; index of the
            first row of padding, at least the number of rows to copy.
        indices: int64 `[indices]`, at least as many as rows if any of them counts: indices of the rows from the
            address.
        rows: The target, `[rows, ...]`, contiguous, of a multiple of 8 bytes each. Rows between those to copy and
            padding stay.

    Raises:
        ValueError: There are rows to copy, and they are on a GPU.
    """
    address, count, scattered, padding = source.tolist()
    target = rows.view(len(rows), prod(rows.shape[1:])).view(torch.uint8)
    target[padding:] = 0
    if not count:
        return
    if rows.is_cuda:
        raise ValueError("the reference reads memory of the host: expected rows there")
    wanted = indices[:count] if scattered else torch.arange(count, device=indices.device)
    shape = int(wanted.max()) + 1, target.shape[1]
    memory = (c_uint8 * (shape[0] * shape[1])).from_address(address)
    target[:count] = torch.frombuffer(memory, dtype=torch.uint8).view(shape)[wanted]
