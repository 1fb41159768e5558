"""Collectives of torch (`torch.distributed._functional_collectives`, which sharded weights use) in runs of a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.watch.rules import written_arguments
from varlen_graphs.watch.sharded import is_wrapper

NAMESPACES = ("_c10d_functional", "_dtensor")
"""Of the operators that are collectives, or wait for one."""


def is_collective(operator: Any) -> bool:
    """Whether an operator needs other ranks, or waits for them."""
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace in NAMESPACES


def waiting(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that has ended when it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, operator(*args, **kwargs))

    return run


class Rehearsal(TorchDispatchMode):
    """Runs without other ranks: collectives give tensors of the right form, zeros, or leave what they would write."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # until it has become operations on what this rank has
        if not is_collective(func):
            return func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if written := written_arguments(func, args, kwargs):
            return written[0]
        device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        forms = func(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
        return tree_map_only(Tensor, lambda form: torch.zeros_like(form, device=device), forms)
