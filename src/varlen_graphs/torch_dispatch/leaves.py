"""The tensors among the arguments and results of a function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PLAIN = frozenset(
    [type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format]
)  # fmt: skip
"""Types of most other arguments, which hold no tensors."""

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Tensor types with memory of their own; subclasses may consist of other tensors."""


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, those in containers included, in their order."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif kind in (list, tuple):  # shapes, mostly: `tree_leaves` takes longer than many an operator
            found += tensors_in(value, {})
        else:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def leaves_of(result: Any) -> list[Any]:
    """Return the leaves of a result, which mostly is one tensor."""
    return [result] if isinstance(result, Tensor) else tree_leaves(result)
