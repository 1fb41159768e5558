"""What a CUDA graph cannot hold, told from the function or operator that is called."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_HOST_READS = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in (
        "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__",
        "is_nonzero", "__contains__", "__repr__", "__format__",
    )
}  # fmt: skip


def reads_on_host(function: Any) -> str | None:
    """The name of `function` if it makes the host wait for a tensor's values."""
    try:
        return _HOST_READS.get(function)
    except TypeError:  # an overload that cannot be hashed
        return None


def copies_to_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `function` copies its tensor to the CPU by name; a `torch.device` may be the module's own."""
    return function is Tensor.to and "cpu" in (kwargs.get("device"), *(a for a in args[1:] if isinstance(a, str)))


def copies_to_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], from_pageable: bool) -> bool:
    """Whether `function` copies pageable host memory to the device."""
    if function in (torch.tensor, torch.as_tensor) and not makes_on_host(kwargs):
        return not isinstance(args[0] if args else kwargs.get("data"), Tensor)
    if function is Tensor.new_tensor:
        return True
    if not from_pageable or function not in (Tensor.to, Tensor.cuda):
        return False
    targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    return function is Tensor.cuda or any(
        isinstance(target, torch.device | Tensor) or (isinstance(target, str) and target != "cpu") for target in targets
    )


def makes_on_host(kwargs: dict[str, Any]) -> bool:
    """Whether a factory with these arguments makes a host tensor; a `torch.device` may be the module's own."""
    device = kwargs.get("device")
    return device is None or (isinstance(device, str) and device == "cpu")


def shape_depends_on_data(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_host: Callable[[Tensor], bool]
) -> bool:
    """Whether the shape of an operator's result, or a branch inside it, depends on values on the device."""
    if operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _has_mask(args[1])
    if operator in (aten.index_put.default, aten.index_put_.default):
        fills = args[2].numel() == 1 and is_host(args[2]) and not (len(args) > 3 and args[3])
        return _has_mask(args[1]) and not fills  # one number from the host is filled in under the mask
    if operator is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if operator is aten._linalg_check_errors.default:
        return True
    return torch.Tag.data_dependent_output in operator.tags or torch.Tag.dynamic_output_shape in operator.tags


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operator writes into."""
    if not operator._schema.is_mutable:
        return []
    named = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)} | kwargs
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [named[name] for name in written if isinstance(named.get(name), Tensor)]


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
