"""Runs beside replays: indices are checked, and attention is not planned for each length."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.thread_modes import Result, RunMode, run_under

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


def run_checked(run: Callable[[], Result], device: torch.device, mode: "CheckedIndices | None" = None) -> Result:
    """Call a function that runs a module: on a GPU under a `CheckedIndices`, given or new."""
    return run_under(run, mode or CheckedIndices()) if device.type == "cuda" else run()


class OutOfRangeError(IndexError):
    """An operator got indices from `low` to `high`, but they may be from `least` to `most`."""

    def __init__(self, operator: Any, low: int, high: int, least: int, most: int) -> None:
        super().__init__(f"{operator} got indices from {low} to {high}, for a dimension of size {most + 1}")
        self.low, self.high, self.least, self.most = low, high, least, most


class CheckedIndices(RunMode):
    """Raises `OutOfRangeError` for an index out of range, as the CPU does, and computes attention without cuDNN.

    On a GPU such an index would end the process's use of CUDA; the check syncs at every operator that takes indices.
    And cuDNN spends some 30 ms planning for each new length of a segment, which synthetic items are full of.

    Attributes:
        has_indices: True if some operator took indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_indices = False

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        packet = getattr(func, "overloadpacket", None)
        if packet is aten._scaled_dot_product_cudnn_attention:
            return _attention(func, *args, **kwargs)
        indices = _INDICES.get(packet)
        self.has_indices |= indices is not None
        for index, size, lowest in indices(args) if indices is not None else ():
            if index.numel() and index.dtype not in (torch.bool, torch.uint8):
                low, high = (int(bound) for bound in torch.stack(index.aminmax()).tolist())
                if low < lowest or high >= size:
                    raise OutOfRangeError(func, low, high, lowest, size - 1)
        return func(*args, **kwargs)


def _attention(
    planned: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    log_sumexp: bool,
    dropout: float = 0.0,
    *more: bool,
    scale: float | None = None,
) -> Any:
    """Return what cuDNN's attention returns, from another kernel of torch where that one takes the arguments."""
    plain = bias is None and not (log_sumexp or dropout or query.is_nested)
    if plain and query.shape[:-2] == key.shape[:-2]:  # it takes no fewer heads of keys
        with suppress(RuntimeError):  # nor arbitrary strides
            output, sums, seed, offset = aten._scaled_dot_product_efficient_attention(
                query, key, value, None, log_sumexp, dropout, *more[:1], scale=scale
            )
            return output, sums, None, None, query.shape[-2], key.shape[-2], seed, offset, None
    return planned(query, key, value, bias, log_sumexp, dropout, *more, scale=scale)


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
"""Functions that find the indices among the arguments of an operator."""
