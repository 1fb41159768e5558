"""Custom buffers that are computed on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.layouts.item_table import ItemTable


@dataclass(frozen=True)
class DeviceBuffer(Buffer):
    """Custom buffer: a function of the item table, made of tensor operations that become part of the graph.

    Attributes:
        name: Argument to fill.
        function: Maps an `ItemTable` to a tensor or a tuple of tensors whose shapes depend on `table.budget` only, and
            does not sync. `lambda table: table` passes the table itself to a custom forward.
        any_segments: False if the function uses no segments, so that it does not count segments against budgets.

    Raises:
        SpecError: `function` is no function.
    """

    name: str
    function: Callable[[ItemTable], Any]
    any_segments: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> Any:
        """Return the result of `function`."""
        return self.function(table)
