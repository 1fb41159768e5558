"""Coordinates of rows in the grid of their item."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names, axis_size
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order


@dataclass(frozen=True)
class GridPositions(Buffer):
    """Coordinates of each row in the grid of its item, int64 `[rows, axes]`; 0 in padding.

    Attributes:
        name: Argument to fill.
        order: Order of the rows of a frame: `"raster"`, or `"merge_block"` with the merge size of the layout.
        axes: Coordinates to compute, such as `("h", "w")` or `("t", "h", "w")`.
        largest: Largest size of an item along the axes, where the module looks the coordinates up in a table; a larger
            one raises `LayoutError`. `None` for no limit.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, `order` is unknown, or `largest` is below 1.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"
    order: Order = "raster"
    axes: tuple[Axis, ...] = ("h", "w")
    largest: int | None = None

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)
        if self.largest is not None:
            check_at_least(self, 1, "largest")

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the coordinates, int64 `[rows, axes]`."""
        at = cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), table.merge(self.order)))
        return at if self.largest is None else at.clamp(max=self.largest - 1)  # captured with items of any size

    def size(self, item: Sequence[int]) -> int:
        """Return the largest size of an item along the axes."""
        return max(axis_size(item, axis) for axis in self.axes)
