"""Indices and weights of interpolated position embeddings."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.interpolation import side_of
from varlen_graphs.kernels.interpolation.op import interpolation_taps
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layout.fields import check_at_least, check_fields
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order


@dataclass(frozen=True)
class _InterpolationTaps(Buffer):
    any_segments = False
    for_rows = "packed"
    name: str
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "entries")
        side_of(self.entries, self.mode)

    def taps(self, table: ItemTable) -> tuple[Tensor, Tensor]:
        """Return indices, int64 `[rows, taps]`, and weights, float32 `[rows, taps]`."""
        side, merge = side_of(self.entries, self.mode), table.merge(self.order)
        taps = interpolation_taps(table.values, table.budget.rows, side, self.mode, self.align_corners, merge)
        return cast(tuple[Tensor, Tensor], taps)


@dataclass(frozen=True)
class InterpolationIndices(_InterpolationTaps):
    """Indices of the table entries that each row interpolates, int64 `[rows, taps]`.

    For modules that gather the entries themselves.

    Attributes:
        name: Argument to fill.
        entries: Number of entries of the square table.
        mode: `"bilinear"` (4 taps) or `"bicubic"` (16).
        align_corners: As in `torch.nn.functional.interpolate`.
        order: Order of the rows of a frame.

    Raises:
        SpecError: `mode` or `order` is unknown, or `entries` is not a square.
    """

    name: str = "interp_indices"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the indices, int64 `[rows, taps]`."""
        return self.taps(table)[0]


@dataclass(frozen=True)
class InterpolationWeights(_InterpolationTaps):
    """Weights of the entries of `InterpolationIndices`, float32 `[rows, taps]`, with the same attributes."""

    name: str = "interp_weights"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the weights, float32 `[rows, taps]`."""
        return self.taps(table)[1]
