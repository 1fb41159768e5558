"""Order of packed rows behind prefix rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.layouts.item_table import ItemTable


@dataclass(frozen=True)
class PrefixIndex(Buffer):
    """Index that puts the prefix rows which the layout declares before the rows of each item.

    The module applies it to its rows, `[rows, dim]`, and the prefix rows after them:
    `torch.cat([rows, prefix])[index]` is `[rows + items * prefix, dim]`. Outputs declared as `Rows(prefix=...)` are in
    that order.

    Attributes:
        name: Argument to fill.
        per_item: If True, each item has prefix rows of its own, `[items * prefix, dim]`, such as the tokens of its
            text; if False, all items share `[prefix, dim]`.
        inverse: If True, the index leads back: to the rows, then to the prefix rows of all items.

    Raises:
        SpecError: A field has a value of another kind.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "prefix_index"
    per_item: bool = False
    inverse: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the index, int64 `[rows + items * prefix]`, with valid entries in padding."""
        if self.inverse:
            return torch.cat([table.row_places, table.prefix_places.flatten()])
        rows, (items, prefix) = table.budget.rows, table.prefix_places.shape
        own = torch.arange(items * prefix if self.per_item else prefix, device=table.device)
        index = torch.full((table.rows_with_prefix,), rows, device=table.device)
        index[table.prefix_places] = rows + (own.view(items, prefix) if self.per_item else own)
        index[table.row_places] = table.row  # last: places of padding items lie among those of padding rows
        return index
