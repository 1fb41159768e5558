"""Order of packed rows behind prefix rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.layout.fields import check_fields
from varlen_graphs.layout.item_table import ItemTable


@dataclass(frozen=True)
class PrefixIndex(Buffer):
    """Index that puts the prefix rows which the layout declares before the rows of each item.

    The module applies it to its rows and the prefix rows, which all items share:
    `torch.cat([rows, prefix])[index]`, with `[rows, dim]` and `[prefix, dim]`, is `[rows + items * prefix, dim]`.
    Outputs declared as `Rows(prefix=...)` are in that order.

    Attributes:
        name: Argument to fill.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "prefix_index"

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the index, int64 `[rows + items * prefix]`, with valid entries in padding."""
        rows, prefix = table.budget.rows, table.layout.prefix
        index = torch.full((table.rows_with_prefix,), rows, device=table.device)
        index[table.prefix_places] = rows + torch.arange(prefix, device=table.device)
        index[table.row_places] = table.row  # last: starts of padding items lie among the padding rows
        return index
