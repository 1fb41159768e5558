"""Indices of rows within their item."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layouts.item_table import ItemTable


@dataclass(frozen=True)
class RowPositions(Buffer):
    """Index of each row within its item, int64 `[rows]`: 0, 1, 2, ... for each item; 0 in padding.

    Attributes:
        name: Argument to fill.
        largest: Most rows of an item, where the module looks the indices up in a table; items with more raise
            `LayoutError`. `None` for no limit.

    Raises:
        SpecError: `largest` is below 1.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_ids"
    largest: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.largest is not None:
            check_at_least(self, 1, "largest")

    def size(self, item: Sequence[int]) -> int:
        """Return the rows of an item."""
        return item[0] * item[1] * item[2]

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the indices, int64 `[rows]`."""
        at = cast(Tensor, positions(table.values, table.budget.rows, "row", 1)).squeeze(-1)
        return at if self.largest is None else at.clamp(max=self.largest - 1)  # captured with items of any size
