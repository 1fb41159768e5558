"""Custom buffers that are computed on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.fields import check_fields, check_pad, is_integer
from varlen_graphs.layout.items import Layout

Capacity = Literal["rows", "items", "segments"]

Dim = int | Capacity


@dataclass(frozen=True)
class HostBuffer:
    """Custom buffer that is computed on the host before every replay and copied into static memory.

    Prefer `DeviceBuffer`: with a `HostBuffer`, each call pays for the function and for one copy to the device. During a
    capture the buffer holds `pad`.

    Attributes:
        name: Argument to fill.
        function: Maps a `Layout` to a CPU tensor `[n, ...]` whose first dimension is at most that of `shape`.
        shape: Static shape, in which `"rows"`, `"items"` and `"segments"` are the capacities of the budget, for example
            `("rows", 2)`.
        dtype: Dtype of the static tensor.
        pad: Value of the entries past `n`.

    Raises:
        SpecError: `shape` is empty or has other entries than integers and capacities, `dtype` is not a dtype, or
            it cannot hold `pad`.
    """

    name: str
    function: Callable[[Layout], Tensor]
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    pad: bool | float = 0
    any_segments: ClassVar[bool] = True
    for_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        names = get_args(Capacity)
        sound = isinstance(self.shape, tuple | list) and all(_is_dim(d) for d in self.shape)
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
        check_fields(self)
        check_pad(self, self.dtype)

    def capacity(self, budget: Budget) -> tuple[int, ...]:
        """Return the static shape at a budget."""
        return tuple(dim if isinstance(dim, int) else getattr(budget, dim) for dim in self.shape)

    def compute(self, layout: Layout, budget: Budget) -> Tensor:
        """Return the buffer for `layout` on the CPU, padded to the capacity of `budget`.

        Raises:
            SpecError: The function returned something other than a tensor that fits `shape`.
        """
        value, capacity = self.function(layout), self.capacity(budget)
        sound = isinstance(value, Tensor) and value.dim() == len(capacity) and value.shape[1:] == capacity[1:]
        if not sound or value.shape[0] > capacity[0]:
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(
                f"the function of HostBuffer {self.name!r} returned {came}: expected a CPU tensor that fits "
                f"{list(capacity)} ({list(self.shape)} at this budget)"
            )
        padded = torch.full(capacity, self.pad, dtype=self.dtype, device="cpu")
        padded[: value.shape[0]] = value
        return padded


def _is_dim(dim: Any) -> bool:
    return (is_integer(dim) and dim >= 0) or (isinstance(dim, str) and dim in get_args(Capacity))
