"""Coordinates of rows in the grid of their item."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layout.fields import check_fields
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order


@dataclass(frozen=True)
class GridPositions(Buffer):
    """Coordinates of each row in the grid of its item, int64 `[rows, axes]`; 0 in padding.

    Attributes:
        name: Argument to fill.
        order: Order of the rows of a frame: `"raster"`, or `"merge_block"` with the merge size of the layout.
        axes: Coordinates to compute, such as `("h", "w")` or `("t", "h", "w")`.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, or `order` is unknown.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"
    order: Order = "raster"
    axes: tuple[Axis, ...] = ("h", "w")

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the coordinates, int64 `[rows, axes]`."""
        return cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), table.merge(self.order)))
