"""Arguments of operators that are used in arithmetic."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_RANGES = (aten.arange, aten.range, aten.linspace, aten.logspace)
"""Their numbers determine the size of the result, or positions in it."""

_NUMBERS = ("number", "float", "Tensor")


def scalars_of(operator: Any, results: list[Any]) -> frozenset[str]:
    """Return the names of arguments that are factors, limits or fill values of a floating-point result."""
    # Sizes, dimensions and indices are excluded. So is integer arithmetic, which mostly computes indices.
    if not isinstance(operator, torch._ops.OpOverload) or operator.overloadpacket in _RANGES:
        return frozenset()
    tensors = [result for result in results if isinstance(result, Tensor)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return frozenset()
    arguments = operator._schema.arguments
    return frozenset(own.name for own in arguments if any(kind in str(own.type) for kind in _NUMBERS))
