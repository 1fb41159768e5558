"""Copy of rows from an address, on the host: the specification."""

from ctypes import memmove

from torch import Tensor


def copy_rows(source: Tensor, rows: Tensor) -> None:
    """Copy the first bytes of `rows` from an address.

    Whoever writes the address vouches for the memory there, until the copy has run.

    Args:
        source: int64 `[2]`: address of the memory to copy, on the device of `rows`, and its size in bytes, at most that
            of `rows`; multiples of 8.
        rows: The target, contiguous. Changed in place.
    """
    address, size = source.tolist()
    memmove(rows.data_ptr(), address, size)
