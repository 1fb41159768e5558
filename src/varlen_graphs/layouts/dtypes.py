"""The dtype of a module, and dtypes for which torch lacks kernels, such as those that copy many tensors at once."""

from itertools import chain

import torch
from torch import Tensor, nn

_PLAIN = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Dtypes of the same size that have all kernels."""


def module_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the module's first floating matrix, which rows meet first, or of another parameter.

    Parameters of one byte do not count. Without any it is the default dtype.
    """
    first: torch.dtype | None = None
    for one in module.parameters():
        if one.is_floating_point() and one.dtype.itemsize > 1:
            if not nn.parameter.is_lazy(one) and one.numel() > max(one.shape, default=1):
                return one.dtype
            first = first or one.dtype
    return first or torch.get_default_dtype()


def why_not_loaded(module: nn.Module) -> str | None:
    """Return that weights of a module are on the meta device, without values, and what to do; `None` if none are."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    name = next((name for name, one in tensors if one.is_meta), None)
    if name is None:
        return None
    return (
        f"{type(module).__name__} has {name!r} on the meta device, where weights have no values: expected all on one "
        "device; load them first, by from_pretrained(...), by load_state_dict(..., assign=True), or by "
        "to_empty(device=...) and then load_state_dict(...)"
    )


def plain(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a dtype that has all kernels: a view, or the tensor itself."""
    return tensor.view(_PLAIN[tensor.dtype]) if tensor.dtype in _PLAIN else tensor


def as_before(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `plain` bits as the dtype that they had; torch gives a view of another dtype no gradient."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def plain_number(number: float, dtype: torch.dtype) -> float:
    """Return the number with the bits that an integer has in this dtype: 0 for a floating or complex one without."""
    bits = 8 * dtype.itemsize
    if dtype not in _PLAIN:
        return number
    if dtype.is_floating_point or dtype.is_complex:
        return 0
    whole = int(number)
    return whole - (whole >> (bits - 1) << bits)
