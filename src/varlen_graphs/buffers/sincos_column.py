"""Sine and cosine position embeddings of a column of the layout."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.sincos import RowEntries, check_frequencies, sincos_table
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.shadows.constants import DeviceConstants


@dataclass(frozen=True, eq=False)  # == is undefined for the tensors in it
class SinCosColumn(Buffer):
    """Sines and cosines of a column of the layout, for `add_sincos`: a pair `(entries, index)`.

    Like `SinCos`, but with one position per item over all channels; zeros where the column is negative. `entries` are
    float32 `[items, 2 * frequencies]`, computed inside the graph, so the column may hold any numbers; `index` is int64
    `[rows]`.

    Attributes:
        name: Argument to fill.
        column: Name of the column.
        frequencies: Float32 `[frequencies]`; a row has twice as many channels.

    Raises:
        SpecError: `frequencies` are not floating `[frequencies]`.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    column: str
    frequencies: Tensor
    _frequencies: DeviceConstants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_frequencies(self, self.frequencies)
        object.__setattr__(self, "_frequencies", DeviceConstants(self.frequencies.cpu))

    def produce(self, table: ItemTable, module: nn.Module) -> RowEntries:
        """Return `(entries, index)`."""
        column = table.column(self.column)
        entries = sincos_table(column, self._frequencies.on(table.device))
        return torch.where(column[:, None] < 0, 0, entries), table.row_item
