"""Check indices on the host before the GPU uses them: there an index out of range ends the process's use of CUDA."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.watch.thread_modes import ThreadDispatchMode

aten = torch.ops.aten

Checked = Iterator[tuple[Tensor, int, int]]
"""Indices of an operator, with the size of their dimension and the lowest index allowed."""

_BY_LIST = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._unsafe_index_put)
"""Operators with a list of indices, one a dimension, as their second argument."""

_BY_DIM = (
    aten.gather, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_, aten.index_fill, aten.index_fill_,
    aten.index_select, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce,
    aten.scatter_reduce_,
)  # fmt: skip
"""Operators with a dimension and an index as their second and third argument."""


class CheckedIndices(ThreadDispatchMode):
    """Raises `IndexError` for an index out of range, as the CPU does. Syncs at every operator that takes indices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        indices = _INDICES.get(getattr(func, "overloadpacket", None))
        for index, size, lowest in indices(args) if indices is not None else ():
            if index.numel() and index.dtype not in (torch.bool, torch.uint8):
                low, high = (int(bound) for bound in torch.stack(index.aminmax()).tolist())
                if low < lowest or high >= size:
                    raise IndexError(f"{func} got indices from {low} to {high}, for a dimension of size {size}")
        return func(*args, **(kwargs or {}))


def _by_list(args: Sequence[Any]) -> Checked:
    dim = 0
    for index in args[1]:
        if index is not None and index.dtype not in (torch.bool, torch.uint8):
            yield index, args[0].shape[dim], -args[0].shape[dim]
        dim += index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1


def _by_dim(args: Sequence[Any]) -> Checked:
    if isinstance(args[2], Tensor) and args[0].dim():
        yield args[2], args[0].shape[args[1]], 0


def _of_embedding(args: Sequence[Any]) -> Checked:
    yield args[1], len(args[0]), 0


def _of_take(args: Sequence[Any]) -> Checked:
    yield args[1], args[0].numel(), -args[0].numel()


_INDICES: dict[Any, Callable[[Sequence[Any]], Checked]] = {
    **dict.fromkeys(_BY_LIST, _by_list),
    **dict.fromkeys(_BY_DIM, _by_dim),
    aten.embedding: _of_embedding,
    aten.take: _of_take,
}
"""What finds the indices among the arguments of an operator."""
