"""Numbers of rows that follow from a size and a position in it, and have to be what the host computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer, check_largest
from varlen_graphs.buffers.kept import Kept
from varlen_graphs.buffers.positions import Axis, axis_names, axis_size
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layout.item_table import ItemTable


@dataclass(frozen=True)
class Lookup(Buffer):
    """A number for each row by the size of its item and its position there, int64 `[rows, axes]`.

    The host computes the numbers of all sizes up to `largest` once, and the graph looks them up in a table of `largest`
    squared entries. This is for functions whose rounding only the host repeats; others are a `DeviceBuffer`.

    Attributes:
        name: The argument it fills.
        function: The numbers of a size: from an int to a CPU tensor of integers `[size]`, each fitting into 32 bits.
        axes: Sizes and positions of what: `("h", "w")` of the frame, or `("row",)` of the rows of the item.
        largest: The largest size. A call with a larger one is a `LayoutError`; items on the GPU cost one copy to the
            host where they have more rows than this in all.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    function: Callable[[int], Tensor]
    axes: tuple[Axis, ...] = ("h", "w")
    largest: int = 1024
    _numbers: Kept = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_largest(self, self.largest)
        object.__setattr__(self, "_numbers", Kept(self._compute))

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int64 `[rows, axes]`."""
        at = cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), 1))
        of_item = {"t": table.t, "h": table.h, "w": table.w, "row": table.item_rows}
        sizes = torch.stack([of_item[axis] for axis in self.axes], 1)[table.row_item]
        # Graphs are captured with items of any size.
        sizes, at = sizes.clamp(max=self.largest), at.clamp(max=self.largest - 1)
        return self._numbers.on(table.device)[sizes, at].long()

    def size(self, item: Sequence[int]) -> int:
        """The largest size that is looked up for an item."""
        return max(axis_size(item, axis) for axis in self.axes)

    def _compute(self) -> Tensor:
        """int32 `[largest + 1, largest]`, by size and position."""
        numbers = torch.zeros(self.largest + 1, self.largest, dtype=torch.int32, device="cpu")
        for size in range(1, self.largest + 1):
            own = self.function(size)
            if own.shape != (size,) or not (own.int() == own).all():
                raise SpecError(
                    f"the function of {self!r} gave {own.dtype} {list(own.shape)} for {size}: expected integers "
                    f"[{size}] that fit into 32 bits"
                )
            numbers[size, :size] = own
        return numbers
