"""Indices and weights of interpolated position embeddings."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.interpolation import side_of
from varlen_graphs.kernels.interpolation.op import interpolation_taps
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order


@dataclass(frozen=True)
class InterpolationIndices(Buffer):
    """Indices of the table entries that each row interpolates, int64 `[rows, taps]`.

    For modules that gather the entries themselves.

    Attributes:
        name: Argument to fill.
        entries: Number of entries of the square table.
        mode: `"bilinear"` (4 taps) or `"bicubic"` (16).
        align_corners: As in `torch.nn.functional.interpolate`.
        order: Order of the rows of a frame.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "interp_indices"
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the indices, int64 `[rows, taps]`.

        Raises:
            SpecError: `mode` or `order` is unknown, or `entries` is not a square.
        """
        return _taps(table, self.entries, self.mode, self.align_corners, self.order)[0]


@dataclass(frozen=True)
class InterpolationWeights(Buffer):
    """Weights of the entries of `InterpolationIndices`, float32 `[rows, taps]`.

    Attributes:
        name: Argument to fill.
        entries: Number of entries of the square table.
        mode: `"bilinear"` (4 taps) or `"bicubic"` (16).
        align_corners: As in `torch.nn.functional.interpolate`.
        order: Order of the rows of a frame.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "interp_weights"
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the weights, float32 `[rows, taps]`.

        Raises:
            SpecError: `mode` or `order` is unknown, or `entries` is not a square.
        """
        return _taps(table, self.entries, self.mode, self.align_corners, self.order)[1]


def _taps(table: ItemTable, entries: int, mode: Mode, align_corners: bool, order: Order) -> tuple[Tensor, Tensor]:
    side, merge = side_of(entries, mode), table.merge(order)
    taps = interpolation_taps(table.values, table.budget.rows, side, mode, align_corners, merge)
    return cast(tuple[Tensor, Tensor], taps)
