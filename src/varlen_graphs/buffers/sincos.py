"""Sines and cosines of positions, for a module to add to its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer, check_largest
from varlen_graphs.buffers.kept import Kept
from varlen_graphs.buffers.positions import Axis, axis_names, axis_size
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layout.item_table import ItemTable

RowEntries = tuple[Tensor, Tensor]
"""Floating `[entries, n]`, and which entries each row has: int64 `[rows]`, or `[rows, axes]`, one after another."""


def add_sincos(rows: Tensor, sincos: RowEntries) -> Tensor:
    """`rows` `[rows, dim]` and what a `SinCos` or `SinCosColumn` buffer has for each; rounded to their dtype before."""
    entries, index = sincos
    return rows + F.embedding(index, entries.to(rows.dtype)).flatten(1)


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class SinCos(Buffer):
    """Sines and cosines of the place of each row in its frame, for `add_sincos`: `(entries, index)`.

    Each axis has an equal share of the channels: the sines of its position times each frequency, then the cosines.
    `entries` are those of one axis at every position, float32 `[largest, 2 * frequencies]`, computed once on the host;
    `index` is int64 `[rows, axes]`.

    Attributes:
        name: The argument it fills.
        frequencies: Float32 `[frequencies]`, usually `10_000 ** -(i / n)`; a row has `2 * axes` times as many channels.
        axes: What has which share: `("w", "h")` is the usual one of two-dimensional positions.
        largest: The largest size along an axis. A call with a larger one is a `LayoutError`; items on the GPU cost one
            copy to the host where they have more rows than this in all.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    frequencies: Tensor
    axes: tuple[Axis, ...] = ("w", "h")
    largest: int = 1024
    _entries: Kept = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_largest(self, self.largest)
        object.__setattr__(
            self, "_entries", Kept(lambda: _sincos(torch.arange(self.largest, device="cpu"), self.frequencies.cpu()))
        )

    def produce(self, table: ItemTable, module: nn.Module) -> RowEntries:
        """`(entries, index)`."""
        at = cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), 1))
        return self._entries.on(table.device), at.clamp(max=self.largest - 1)  # captured with items of any size

    def size(self, item: Sequence[int]) -> int:
        """The largest size along an axis of an item."""
        return max(axis_size(item, axis) for axis in self.axes)


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class SinCosColumn(Buffer):
    """The same of a column of the layout, one position an item, over all channels; zeros for numbers below 0.

    `entries` are float32 `[items, 2 * frequencies]`, computed inside the graph, so a column may have any numbers;
    `index` is int64 `[rows]`.

    Attributes:
        name: The argument it fills.
        column: The column.
        frequencies: Float32 `[frequencies]`; a row has twice as many channels.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    column: str
    frequencies: Tensor
    _frequencies: Kept = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_frequencies", Kept(self.frequencies.cpu))

    def produce(self, table: ItemTable, module: nn.Module) -> RowEntries:
        """`(entries, index)`."""
        column = table.column(self.column)
        entries = _sincos(column, self._frequencies.on(table.device))
        return torch.where(column[:, None] < 0, 0, entries), table.row_item


def _sincos(at: Tensor, frequencies: Tensor) -> Tensor:
    """Float32 `[positions, 2 * frequencies]`: sines, then cosines."""
    angles = at.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
