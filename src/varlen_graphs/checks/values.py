"""Checks and quoting of the values with which a call describes its items."""

import reprlib
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from varlen_graphs.errors import InputError, LayoutError, counted
from varlen_graphs.torch_dispatch.leaves import PLAIN_TENSORS

INT64_MAX = 2**63 - 1

INTEGERS = frozenset(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
"""Integer dtypes that layout arguments accept."""


def is_integers(value: Any, dims: int) -> bool:
    """Return True if `value` is a dense, non-empty integer tensor with `dims` dimensions."""
    return (
        isinstance(value, Tensor)
        and value.dtype in INTEGERS
        and is_dense(value)
        and value.dim() == dims
        and value.shape[0] > 0
    )


def is_dense(tensor: Tensor) -> bool:
    """Return True unless the tensor is sparse, nested, quantized or on the meta device."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def check_not_freed(tensor: Tensor, name: str) -> None:
    """Check that there is memory behind a tensor, an argument of this name.

    Raises:
        InputError: It was freed, or there never was any.
    """
    if type(tensor) not in PLAIN_TENSORS or not tensor.numel() or tensor._is_zerotensor():
        return
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise InputError(
            f"{name} has no memory of its own, as under a transform of torch.func ({quoted(str(error))}): expected a "
            "tensor of values; call the module itself under transforms, vg.unwrap(model) or encoder.module"
        ) from None
    if address == tensor.storage_offset() * tensor.itemsize:
        raise InputError(f"the memory of {name} was freed (untyped_storage().resize_(0)); pass another tensor")


def check_has_values(name: str, value: Any) -> None:
    """Check that a tensor, or the first one of a list, is none that tracers make up, which has a shape and no values.

    Inside of such a tracer itself, calls run eager.

    Raises:
        InputError: It is.
    """
    tensor = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(tensor, FakeTensor) or torch._C._len_torch_dispatch_stack():
        return
    raise InputError(
        f"{name} is a FakeTensor, which has a shape and no values: expected a tensor of values; trace the module "
        "itself, vg.unwrap(model) or encoder.module"
    )


_SMALL = (list, tuple, int)

EMPTY_ITEMS = 2**14
"""Number of items without rows that a call may have in any case."""


def check_numbers(name: str, value: Any, rows: int) -> None:
    """Check that `value` holds no more numbers than the items of `rows` rows, and some without rows, can need.

    Runs before `tolist`: an expanded tensor or array can claim more elements than memory holds as a list.

    Raises:
        LayoutError: `value` holds more than three numbers per row and per item without rows.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    numbers = 0
    for entry in entries:
        if not isinstance(entry, _SMALL):
            numbers += _numbers(entry)
    if numbers > 3 * (rows + EMPTY_ITEMS):
        raise LayoutError(
            f"{name} holds {counted(numbers, 'number')}, which cannot describe the items of {counted(rows, 'row')}: "
            f"expected at most three numbers per item, and at most {EMPTY_ITEMS} items without rows"
        )


def _numbers(value: Any) -> int:
    """Return the number of elements of a tensor, an array or a range, or 0 for other objects."""
    if isinstance(value, range):
        return max(0, (value.stop - value.start) // value.step)  # `len` fails beyond 2**63
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    return size if isinstance(size, int) else 0


def as_list(name: str, value: Any, expected: str) -> list[Any]:
    """Return `value` as a non-empty list, copying tensors and arrays to the host.

    A list of tensors is stacked, so those on a GPU cost one copy.

    Raises:
        LayoutError: `value` is empty, a non-integer, sparse, nested or meta tensor, or neither a list nor an array.
        InputError: The memory of `value` was freed.
    """
    value = stacked(name, value)
    if isinstance(value, Tensor):
        if value.dtype not in INTEGERS:
            raise LayoutError(f"{name} is a {value.dtype} tensor: expected integers, {expected}; try {name}.long()")
        if not is_dense(value):
            raise LayoutError(
                f"{name} is a sparse, nested or meta tensor: expected integers, {expected}, in a dense one"
            )
        check_not_freed(value, name)
        value = value.tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    elif isinstance(value, range):
        value = [*value]
    else:
        value = _without_arrays(value)
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{name} is {quoted(value)}: expected integers, {expected}, as a list or a tensor")
    if len(value) == 0:
        raise LayoutError(f"{name} is empty: expected at least one item; skip the call when there is nothing to encode")
    return list(value)


def stacked(name: str, value: Any) -> Any:
    """Return a list of tensors as one tensor, and any other value as it is.

    Raises:
        LayoutError: The tensors make none, because they differ in shape or device.
    """
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Tensor):
        return value
    try:
        return torch.stack([*value])
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise LayoutError(
            f"{name} is a list of tensors that do not make one ({quoted(str(error))}): expected tensors of one shape "
            "and device, one for each item"
        ) from None


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """Return a checked value as a tensor; one that is a tensor stays where it is."""
    value = stacked(name, value)
    return value if isinstance(value, Tensor) else torch.tensor(_without_arrays(value), device=device)


def _without_arrays(value: Any) -> Any:
    """Return a list of arrays as a list of lists, and any other value as it is."""
    if isinstance(value, list | tuple) and value and hasattr(value[0], "tolist"):
        return [entry.tolist() if hasattr(entry, "tolist") else entry for entry in value]
    return value


def size_of(what: str, size: Any, entry: Any) -> int:
    """Return `size` as an int; error messages quote `entry`.

    Raises:
        LayoutError: `size` is not an integer, is below 0, or exceeds int64.
    """
    if not isinstance(size, Integral) or isinstance(size, bool):
        raise LayoutError(f"{what} is {quoted(entry)}: expected integers, got {quoted(size)} ({type(size).__name__})")
    number = int(size)
    if number < 0:
        raise LayoutError(f"{what} is {quoted(entry)}: every size must be at least 0")
    if number > INT64_MAX:
        raise LayoutError(f"{what} is {quoted(entry)}: sizes must be below 2**63; no call has that many rows")
    return number


class _Quoting(reprlib.Repr):
    """`repr` that abridges long or deeply nested values."""

    def repr_int(self, x: int, level: int) -> str:
        """Return the integer, or its size in bits: Python refuses to print thousands of digits."""
        return repr(x) if abs(x) <= 2**128 else f"<an integer of {x.bit_length()} bits>"


_QUOTING = _Quoting()
_QUOTING.maxother = _QUOTING.maxstring = 100


def quoted(value: Any) -> str:
    """Return an abridged `repr` of any value for error messages."""
    return _QUOTING.repr(value)
