"""Checks of what a call brings to describe items, and how messages quote it."""

import reprlib
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import LayoutError

INT64_MAX = 2**63 - 1

INTEGERS = frozenset(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
"""The dtypes of tensors of integers."""


def is_integers(value: Any, dims: int) -> bool:
    """Whether `value` is a tensor of integers with so many dimensions, and not empty."""
    return (
        isinstance(value, Tensor)
        and value.dtype in INTEGERS
        and is_dense(value)
        and value.dim() == dims
        and value.shape[0] > 0
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has one number after the other in memory, to be read: sparse, nested and meta tensors do not."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def check_numbers(name: str, value: Any, rows: int) -> None:
    """Whether what describes items holds no more numbers than so many rows can need.

    Tensors and arrays may say that they hold far more than they have memory for, and a list of these would not.

    Raises:
        LayoutError: It holds more than three for each row.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    numbers = 0
    for entry in entries:
        if not isinstance(entry, list | tuple | int):
            numbers += _numbers(entry)
    if numbers > 3 * rows:
        raise LayoutError(
            f"{name} holds {numbers} numbers, which cannot describe the items of {rows} rows: expected one or three for"
            " each item, and no item without rows"
        )


def _numbers(value: Any) -> int:
    """The entries of a tensor or array; 0 of anything else."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return size if isinstance(size, int) else 0


def as_list(name: str, value: Any, expected: str) -> list[Any]:
    """`value` as a list that is not empty: tensors and arrays are copied to the host, floats are refused there."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGERS:
            raise LayoutError(f"{name} is a {value.dtype} tensor: expected integers, {expected}; try {name}.long()")
        if not is_dense(value):
            raise LayoutError(
                f"{name} is a sparse, nested or meta tensor: expected integers, {expected}, in a dense one"
            )
        value = value.tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{name} is {quoted(value)}: expected integers, {expected}, as a list or a tensor")
    if len(value) == 0:
        raise LayoutError(f"{name} is empty: expected at least one item; skip the call when there is nothing to encode")
    return list(value)


def positive(what: str, size: Any, entry: Any) -> int:
    """A size as an integer, of an entry that messages quote.

    Raises:
        LayoutError: It is no integer, or below 1.
    """
    if not isinstance(size, Integral) or isinstance(size, bool):
        raise LayoutError(f"{what} is {quoted(entry)}: expected integers, got {quoted(size)} ({type(size).__name__})")
    number = int(size)
    if number < 1:
        raise LayoutError(f"{what} is {quoted(entry)}: every size must be at least 1; drop items that are empty")
    if number > INT64_MAX:
        raise LayoutError(f"{what} is {quoted(entry)}: sizes must be below 2**63; these cannot be rows of one call")
    return number


class _Quoting(reprlib.Repr):
    """Abridges what is long or deeply nested."""

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print integers of thousands of digits."""
        return repr(x) if abs(x) <= 2**128 else f"<an integer of {x.bit_length()} bits>"


_QUOTING = _Quoting()
_QUOTING.maxother = _QUOTING.maxstring = 100


def quoted(value: Any) -> str:
    """What came, for messages: a few entries of it, whatever it is."""
    return _QUOTING.repr(value)
