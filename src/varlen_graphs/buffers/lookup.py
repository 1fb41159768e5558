"""Integers per size and position that only the host rounds correctly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names, axis_size
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.shadows.constants import DeviceConstants


@dataclass(frozen=True)
class Lookup(Buffer):
    """Integers per row, looked up by the size of its item and its position in it, int64 `[rows, axes]`.

    The host computes the integers of all sizes up to `largest` once, and the graph looks them up in a table of
    `largest ** 2` entries. Use it for functions whose rounding differs between host and device; otherwise use a
    `DeviceBuffer`.

    Attributes:
        name: Argument to fill.
        function: Maps a size to its integers: an int to a CPU tensor `[size]`, with values that fit into 32 bits.
        axes: Axes of sizes and positions: `("h", "w")` of the frame, or `("row",)` for the rows of the item.
        largest: Largest size. A call with a larger item raises a `LayoutError`; items on the GPU cost one copy to the
            host if they have more rows than this in all.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, or `largest` is below 1.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    function: Callable[[int], Tensor]
    axes: tuple[Axis, ...] = ("h", "w")
    largest: int = 1024
    _numbers: DeviceConstants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)
        check_at_least(self, 1, "largest")
        object.__setattr__(self, "_numbers", DeviceConstants(self._compute))

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the integers, int64 `[rows, axes]`.

        Raises:
            SpecError: The function returned something other than integers `[size]`.
        """
        at = cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), 1))
        of_item = {"t": table.t, "h": table.h, "w": table.w, "row": table.item_rows}
        sizes = torch.stack([of_item[axis] for axis in self.axes], 1)[table.row_item]
        # Captures use items of any size, also larger ones.
        sizes, at = sizes.clamp(max=self.largest), at.clamp(max=self.largest - 1)
        return self._numbers.on(table.device)[sizes, at].long()

    def size(self, item: Sequence[int]) -> int:
        """Return the largest size of an item along the axes."""
        return max(axis_size(item, axis) for axis in self.axes)

    def _compute(self) -> Tensor:
        """Return the table, int32 `[largest + 1, largest]`, indexed by size and position."""
        numbers = torch.zeros(self.largest + 1, self.largest, dtype=torch.int32, device="cpu")
        for size in range(1, self.largest + 1):
            own = self.function(size)
            if own.shape != (size,) or not (own.int() == own).all():
                raise SpecError(
                    f"the function of {self!r} returned {own.dtype} {list(own.shape)} for size {size}: expected "
                    f"integers [{size}] that fit into 32 bits"
                )
            numbers[size, :size] = own
        return numbers
