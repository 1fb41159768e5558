"""Copies of memory by address, on the host: the specification."""

from ctypes import memmove

from torch import Tensor


def transfer_memory(transfers: Tensor, most: int) -> None:
    """Copy blocks of memory, and set their sizes to 0, so that no later run copies them again.

    Whoever writes the addresses vouches for them: the memory must be there until the copies have run.

    Args:
        transfers: int64 `[transfers, 4]`, contiguous: address to copy from, address to copy to, size in bytes, and 0.
            Addresses and sizes are multiples of 8. On a GPU, addresses are those of its memory.
        most: Upper bound of the sizes.
    """
    for source, target, size, _ in transfers.tolist():
        memmove(target, source, size)
    transfers[:, 2] = 0
