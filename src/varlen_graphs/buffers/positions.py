"""Where rows lie in their item."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order

Axis = Literal["t", "h", "w", "row"]
"""A coordinate of a row: its frame, its place in the frame, or its index in the item."""


def axis_names(axes: tuple[Axis, ...]) -> str:
    """The axes as operators take them.

    Raises:
        SpecError: There is no such axis.
    """
    if not axes or not set(axes) <= set(get_args(Axis)):
        raise SpecError(f"axes={axes!r}: expected some of 't', 'h', 'w', 'row'")
    return " ".join(axes)


def axis_size(item: Sequence[int], axis: Axis) -> int:
    """The size of an item along an axis."""
    t, h, w = item[:3]
    return {"t": t, "h": h, "w": w, "row": t * h * w}[axis]


@dataclass(frozen=True)
class GridPositions(Buffer):
    """The coordinates of each row in the grid of its item, int64 `[rows, axes]`; 0 in padding.

    Attributes:
        name: The argument it fills.
        order: How the rows of a frame are ordered: `"raster"`, or `"merge_block"` by the merge size of the layout.
        axes: Which coordinates, `("h", "w")` or `("t", "h", "w")`.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"
    order: Order = "raster"
    axes: tuple[Axis, ...] = ("h", "w")

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int64 `[rows, axes]`."""
        return cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), table.merge(self.order)))


@dataclass(frozen=True)
class RowPositions(Buffer):
    """The index of each row in its item, int64 `[rows]`: 0, 1, 2, ... anew for each item; 0 in padding.

    Attributes:
        name: The argument it fills.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int64 `[rows]`."""
        return cast(Tensor, positions(table.values, table.budget.rows, "row", 1)).squeeze(-1)
