"""Permutation of merged tokens into window order."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.kernels.windows.op import window_index
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Windows


@dataclass(frozen=True)
class WindowIndex(Buffer):
    """Permutation of merged tokens into window order, int64 `[rows / merge ** 2]`.

    `x.view(-1, merge**2, dim)[index]` has the tokens window by window. The permutation covers all tokens of the budget;
    padding tokens stay in place.

    Attributes:
        windows: Windows that each frame is cut into.
        name: Argument to fill.
        inverse: If True, the inverse permutation, which restores the order of the call for outputs.
    """

    any_segments = False
    for_rows = "packed"
    windows: Windows
    name: str = "window_index"
    inverse: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the permutation, int64 `[rows / merge ** 2]`."""
        merge = table.layout.merge
        tokens = table.budget.rows // merge**2
        return cast(Tensor, window_index(table.values, tokens, merge, self.windows.side, self.inverse))
