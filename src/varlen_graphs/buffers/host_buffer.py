"""Custom buffers that are computed on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields, check_pad, is_integer
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.segments import Per, segments_of

Capacity = Literal["rows", "items", "segments", "segments + 1"]

Dim = int | Capacity


@dataclass(frozen=True)
class HostBuffer:
    """Custom buffer that is computed on the host before every replay and copied into static memory.

    Prefer `DeviceBuffer`: with a `HostBuffer`, each call pays for the function and for one copy to the device. During a
    capture the buffer holds `pad`.

    Attributes:
        name: Argument to fill.
        function: Maps the `Layout` of one replay to a CPU tensor `[n, ...]`, with `n` as `shape` says: the rows, items
            or segments of exactly this layout, which may be a part of the call's, or the fixed number.
        shape: Static shape, in which `"rows"`, `"items"`, `"segments"` and `"segments + 1"` are the capacities of the
            budget, for example `("rows", 2)`.
        dtype: Dtype of the static tensor.
        pad: Value of the entries past `n`.
        per: Kind of the segments that `shape` begins with, as in `CuSeqlens`.

    Raises:
        SpecError: `shape` is empty or has other entries than integers and capacities, begins with segments of no kind,
            `dtype` is not a dtype, or it cannot hold `pad`.
    """

    name: str
    function: Callable[[Layout], Tensor]
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    pad: bool | float = 0
    per: Per | None = None
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
        if str(self.shape[0]).startswith("segments") and self.per is None:
            raise SpecError(
                f"HostBuffer({self.name!r}, shape={self.shape!r}): expected per='item', 'frame' or the like, the kind "
                "of segments that the function counts"
            )

    @property
    def any_segments(self) -> bool:
        """True if the buffer may describe segments of any kind."""
        return self.per is None

    def capacity(self, budget: Budget) -> tuple[int, ...]:
        """Return the static shape at a budget."""
        sizes = {"rows": budget.rows, "items": budget.items, "segments": budget.segments}
        sizes["segments + 1"] = budget.segments + 1
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)

    def compute(self, layout: Layout, budget: Budget, merge: int) -> Tensor:
        """Return the buffer for `layout`, of this merge size, on the CPU, padded to the capacity of `budget`.

        Raises:
            SpecError: The function returned something other than a tensor with as many entries as the layout has.
        """
        value, capacity = self.function(layout), self.capacity(budget)
        expected = (self._count(layout, merge), *capacity[1:])
        if not isinstance(value, Tensor) or value.shape != expected:
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(
                f"the function of HostBuffer {self.name!r} returned {came} for {counted(len(layout), 'item')} of "
                f"{counted(layout.total, 'row')}: expected a CPU tensor {list(expected)}, {list(self.shape)} of the "
                "layout that it gets; a replay may have only some items of a call"
            )
        padded = torch.full(capacity, self.pad, dtype=self.dtype, device="cpu")
        own = padded[: value.shape[0]]
        own.copy_(value)
        if not (self.dtype.is_floating_point or self.dtype.is_complex) and not torch.equal(own.to(value.dtype), value):
            raise SpecError(
                f"the function of HostBuffer {self.name!r} returned {value.dtype} numbers that {self.dtype} does not "
                "hold: expected others, or a buffer of another dtype="
            )
        return padded

    def _count(self, layout: Layout, merge: int) -> int:
        """Return the number of entries that a layout has."""
        first = self.shape[0]
        if isinstance(first, int):
            return first
        if first in ("rows", "items"):
            return layout.total if first == "rows" else len(layout)
        assert self.per is not None  # noqa: S101 - checked when it was declared
        if self.per == "group":
            segments = len(layout.groups)
        else:
            segments = sum(segments_of(item, self.per, merge)[0] for item in layout.items)
        return segments + (first == "segments + 1")


def _is_dim(dim: Any) -> bool:
    return (is_integer(dim) and dim >= 0) or (isinstance(dim, str) and dim in get_args(Capacity))
