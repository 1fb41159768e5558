"""What a CUDA graph cannot hold, told from the function or operator that is called."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_HOST_READS = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in (
        "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__",
        "is_nonzero", "__contains__",
    )
}  # fmt: skip


def reads_on_host(function: Any) -> str | None:
    """The name of `function` if it makes the host wait for a tensor's values."""
    try:
        return _HOST_READS.get(function)
    except TypeError:  # an overload that cannot be hashed
        return None


def copies_to_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], from_host: bool) -> bool:
    """Whether `function` copies pageable host memory to the device."""
    if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
        return not isinstance(args[0] if args else kwargs.get("data"), Tensor)
    if not from_host or function not in (Tensor.to, Tensor.cuda):
        return False
    targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    return function is Tensor.cuda or any(isinstance(target, str | torch.device | Tensor) for target in targets)


def shape_depends_on_data(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the shape of an operator's result, or a branch inside it, depends on values on the device."""
    if operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _has_mask(args[1])
    if operator in (aten.index_put.default, aten.index_put_.default):
        return _has_mask(args[1]) and args[2].numel() != 1
    if operator is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in operator.tags or torch.Tag.dynamic_output_shape in operator.tags


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
