"""Sine and cosine position embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names, axis_size
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.shadows.constants import DeviceConstants

RowEntries = tuple[Tensor, Tensor]
"""Floating `[entries, n]`, and int64 `[rows]` or `[rows, axes]`: each row concatenates the entries it indexes."""


def add_sincos(rows: Tensor, sincos: RowEntries) -> Tensor:
    """Add the entries of a `SinCos` or `SinCosColumn` buffer to rows.

    Args:
        rows: Floating `[rows, dim]`.
        sincos: `(entries, index)` of the buffer. The entries are rounded to the dtype of `rows` before the sum.

    Returns:
        `[rows, dim]` in the dtype of `rows`.
    """
    entries, index = sincos
    return rows + F.embedding(index, entries.to(rows.dtype)).flatten(1)


@dataclass(frozen=True, eq=False)  # == is undefined for the tensors in it
class SinCos(Buffer):
    """Sines and cosines of the position of each row in its frame, for `add_sincos`: a pair `(entries, index)`.

    Each axis has an equal share of the channels: the sines of its position times each frequency, then the cosines.
    `entries` hold these for one axis at every position, float32 `[largest, 2 * frequencies]`, computed once on the
    host; `index` is int64 `[rows, axes]`.

    Attributes:
        name: Argument to fill.
        frequencies: Float32 `[frequencies]`, usually `10_000 ** -(i / n)`; a row has `2 * axes` times as many channels.
        axes: Axes in the order of their channels; two-dimensional embeddings usually have `("w", "h")`.
        largest: Largest size along an axis. A call with a larger item raises a `LayoutError`; items on the GPU cost one
            copy to the host if they have more rows than this in all.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, `largest` is below 1, or `frequencies` are
            not floating `[frequencies]`.
    """

    any_segments = False
    for_rows = "packed"
    name: str
    frequencies: Tensor
    axes: tuple[Axis, ...] = ("w", "h")
    largest: int = 1024
    _entries: DeviceConstants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)
        check_at_least(self, 1, "largest")
        check_frequencies(self, self.frequencies)
        object.__setattr__(self, "_entries", DeviceConstants(self._compute))

    def produce(self, table: ItemTable, module: nn.Module) -> RowEntries:
        """Return `(entries, index)`."""
        at = cast(Tensor, positions(table.values, table.budget.rows, axis_names(self.axes), 1))
        return self._entries.on(table.device), at.clamp(max=self.largest - 1)  # captured with items of any size

    def size(self, item: Sequence[int]) -> int:
        """Return the largest size of an item along the axes."""
        return max(axis_size(item, axis) for axis in self.axes)

    def _compute(self) -> Tensor:
        return sincos_table(torch.arange(self.largest, device="cpu"), self.frequencies.cpu())


def check_frequencies(declaration: Buffer, frequencies: Tensor) -> None:
    """Check the frequencies of a buffer."""
    if frequencies.dim() != 1 or not frequencies.is_floating_point():
        raise SpecError(
            f"{type(declaration).__name__}({declaration.name!r}): frequencies are {frequencies.dtype} "
            f"{list(frequencies.shape)}: expected a floating tensor [frequencies]"
        )


def sincos_table(at: Tensor, frequencies: Tensor) -> Tensor:
    """Return sines, then cosines, of positions times frequencies: float32 `[positions, 2 * frequencies]`."""
    angles = at.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
