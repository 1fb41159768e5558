"""Copies from the host to the device: the torch functions and operators that make them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

IsHost = Callable[[Tensor], bool]
NamesHost = Callable[[Any], bool]

MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
"""Functions that copy their first argument to another device, or return it."""

_INDEXING = {
    aten.index.Tensor, aten._unsafe_index.Tensor,
    aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default,
}  # fmt: skip

_COPYING = {*_INDEXING, aten.copy_.default}
"""Operators on device tensors that copy host tensors to the device: indices, and what is copied."""


def copies_to_device(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    from_host: bool,
    names_host: NamesHost,
) -> bool:
    """Return True if a function copies pageable host memory to the device."""
    if function in (torch.tensor, torch.as_tensor):
        data, device = args[0] if args else kwargs.get("data"), kwargs.get("device")
        if device is None or names_host(device):
            return False
        return not isinstance(data, Tensor) or (from_host and not data.is_pinned())
    if function is Tensor.new_tensor:
        return not names_host(kwargs.get("device") or args[0])
    if not from_host or function not in MOVES:
        return False
    to_device = function is Tensor.cuda or not all(map(names_host, targets(args, kwargs)))
    return to_device and not args[0].is_pinned()


def copied_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in the data that a function copies to the device."""
    copied = args[1:2] if function is Tensor.new_tensor else args[:1]
    return [leaf for leaf in tree_leaves(copied or kwargs["data"]) if isinstance(leaf, Tensor)]


def copied_to_device(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_host: IsHost) -> list[Tensor]:
    """Return the host tensors that an operator copies to the device; those among its inputs that it only reads."""
    if operator is aten._to_copy.default:
        target = kwargs.get("device")
        moves = target is not None and target.type != "cpu" and is_host(args[0])
        return [args[0]] if moves else []
    if operator not in _COPYING or is_host(args[0]):
        return []
    sources = (*args[1], *_put(args)) if operator in _INDEXING else args[1:2]
    return [source for source in sources if isinstance(source, Tensor) and is_host(source)]


def _put(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what an operator puts at indices, if it copies that: where a mask is the index, it fills."""
    masked = any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return () if masked else args[2:3]


def lists_to_tensors(index: Any) -> Any:
    """Return an index with host tensors in place of lists of integers, which torch would make on the device."""
    if isinstance(index, tuple):
        return tuple(map(lists_to_tensors, index))
    is_list = isinstance(index, list) and bool(index) and all(type(number) is int for number in index)
    return torch.tensor(index, device="cpu") if is_list else index


def makes_empty(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a function makes a tensor of an empty list, of which nothing is copied to the device."""
    data = kwargs.get("data", args[-1] if args else None)
    of_data = function in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
    return of_data and isinstance(data, list | tuple) and not tree_leaves(data)


def targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of `Tensor.to` or `Tensor.type_as` that may name a device."""
    given = (*args[1:3], kwargs.get("device"), kwargs.get("other"))
    return [target for target in given if isinstance(target, torch.device | str | Tensor)]
