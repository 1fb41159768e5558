"""Functional collectives (`torch.distributed._functional_collectives`), which sharded weights use in a forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.torch_dispatch.rules import written_arguments
from varlen_graphs.torch_dispatch.sharded import is_distributed_tensor
from varlen_graphs.torch_dispatch.thread_modes import ThreadDispatchMode

NAMESPACES = ("_c10d_functional", "_dtensor")
"""Namespaces of the operators that are collectives, or wait for one."""


def is_collective(operator: Any) -> bool:
    """Return True if an operator communicates with other ranks, or waits for them."""
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace in NAMESPACES


def run_and_wait(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make a collective synchronous: its result is complete when it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, operator(*args, **kwargs))

    return run


class DryRun(ThreadDispatchMode):
    """Dispatch mode that runs without other ranks: collectives return zeros of the right shape, and write nothing."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_distributed_tensor, types)):
            return NotImplemented  # its operations on this rank's plain tensors come here in turn
        if not is_collective(func):
            return func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if written := written_arguments(func, args, kwargs):
            return written[0]
        device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        forms = func(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
        return tree_map_only(Tensor, lambda form: torch.zeros_like(form, device=device), forms)
