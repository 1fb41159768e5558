"""Indices of rows within their item."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layout.fields import check_fields
from varlen_graphs.layout.item_table import ItemTable


@dataclass(frozen=True)
class RowPositions(Buffer):
    """Index of each row within its item, int64 `[rows]`: 0, 1, 2, ... for each item; 0 in padding.

    Attributes:
        name: Argument to fill.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the indices, int64 `[rows]`."""
        return cast(Tensor, positions(table.values, table.budget.rows, "row", 1)).squeeze(-1)
