"""Buffers of the user's own: computed on the device, or on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.errors import SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Layout


@dataclass(frozen=True)
class DeviceBuffer(Buffer):
    """A buffer of your own: a function of the item table, made of tensor operations that become part of the graph.

    Attributes:
        name: The argument it fills.
        function: From an `ItemTable` to a tensor (or a tuple of them) whose shape depends on `table.budget` alone.
            `lambda table: table` hands the table itself to a forward of your own.
        any_segments: False: it uses no segments, so that none count against budgets on its account.
    """

    name: str
    function: Callable[[ItemTable], Any]
    any_segments: bool = True

    def produce(self, table: ItemTable, module: nn.Module) -> Any:
        """Whatever `function` returns."""
        return self.function(table)


Capacity = Literal["rows", "items", "segments"]

Dim = int | Capacity


@dataclass(frozen=True)
class HostBuffer:
    """A buffer that only the host can compute: called for every replay, then copied in. It costs that, each time.

    Prefer `DeviceBuffer`. With a `HostBuffer` a call pays for the function and for one copy to the device. During a
    capture the buffer holds `pad`.

    Attributes:
        name: The argument it fills.
        function: From a `Layout` to a CPU tensor `[n, ...]` whose first dimension is at most that of `shape`.
        shape: The static shape; `"rows"`, `"items"`, `"segments"` stand for the capacity of the budget, for example
            `("rows", 2)`.
        dtype: The dtype of the static tensor.
        pad: What the places past the end hold.

    Raises:
        SpecError: `shape` has no dimensions, or others than these, or `dtype` is no dtype.
    """

    name: str
    function: Callable[[Layout], Tensor]
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    pad: float = 0
    any_segments: ClassVar[bool] = True
    for_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        names = get_args(Capacity)
        sound = isinstance(self.shape, tuple | list) and all(isinstance(d, int) or d in names for d in self.shape)
        if not sound or not self.shape:
            raise SpecError(
                f"HostBuffer({self.name!r}, shape={self.shape!r}): expected at least one dimension, such as ('items',)"
                f", and each to be an integer or one of {names}"
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.dtype, torch.dtype):
            raise SpecError(
                f"HostBuffer({self.name!r}, dtype={self.dtype!r}): expected a torch.dtype, such as torch.float32"
            )

    def capacity(self, budget: Budget) -> tuple[int, ...]:
        """The static shape at a budget."""
        return tuple(dim if isinstance(dim, int) else getattr(budget, dim) for dim in self.shape)

    def compute(self, layout: Layout, budget: Budget) -> Tensor:
        """The buffer for `layout`, padded to the capacity of `budget`, on the CPU.

        Raises:
            SpecError: The function returned another shape than was declared.
        """
        value, capacity = self.function(layout), self.capacity(budget)
        if (
            not isinstance(value, Tensor)
            or value.dim() != len(capacity)
            or tuple(value.shape[1:]) != capacity[1:]
            or value.shape[0] > capacity[0]
        ):
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(
                f"the function of HostBuffer {self.name!r} returned {came}: expected a CPU tensor that fits "
                f"{list(capacity)} ({list(self.shape)} at this budget)"
            )
        padded = torch.full(capacity, self.pad, dtype=self.dtype, device="cpu")
        padded[: value.shape[0]] = value
        return padded
