"""Which merged token is where when rows come window by window."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.kernels.windows.op import window_index
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.segments import Windows


@dataclass(frozen=True)
class WindowIndex(Buffer):
    """The merged token at each place of window order, int64 `[rows / merge ** 2]`: `x.view(-1, merge**2, dim)[index]`.

    A permutation of all tokens of the budget: those of padding stay where they are.

    Attributes:
        windows: What frames are cut into.
        name: The argument it fills.
        inverse: The place of each token instead, which brings outputs back into the order of the call.
    """

    any_segments = False
    for_rows = "packed"
    windows: Windows
    name: str = "window_index"
    inverse: bool = False

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int64 `[rows / merge ** 2]`."""
        merge = table.layout.merge
        tokens = table.budget.rows // merge**2
        return cast(Tensor, window_index(table.values, tokens, merge, self.windows.side, self.inverse))
