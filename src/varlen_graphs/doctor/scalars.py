"""Numbers that an operator computes with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_RANGES = (aten.arange, aten.range, aten.linspace, aten.logspace)
"""Their numbers say how large the result is, or are positions in it."""

_NUMBERS = ("number", "float", "Tensor")


def scalars_of(operator: Any, results: Sequence[Any]) -> frozenset[str]:
    """Names of the arguments that are factors, limits or fillings of a result in floating point.

    Sizes, dimensions and indices are none; nor is the arithmetic of integers, which is that of indices.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.overloadpacket in _RANGES:
        return frozenset()
    if not any(
        isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()) for result in results
    ):
        return frozenset()
    arguments = operator._schema.arguments
    return frozenset(own.name for own in arguments if any(kind in str(own.type) for kind in _NUMBERS))
