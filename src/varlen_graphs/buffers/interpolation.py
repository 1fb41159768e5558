"""Position embeddings resampled from a square table to the grid of each item."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer, TensorSource, resolve_tensor
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.interpolation.reference import Mode, interpolate, interpolation_taps
from varlen_graphs.layout import Order
from varlen_graphs.table import ItemTable


def _taps(table: ItemTable, entries: int, mode: Mode, align_corners: bool, order: Order) -> tuple[Tensor, Tensor]:
    if mode != "bilinear":
        raise SpecError(f"mode={mode!r}: expected 'bilinear'")
    side = math.isqrt(entries)
    if side * side != entries:
        raise SpecError(f"the position table has {entries} entries: expected a square number, side by side rows")
    _, h, w = table.positions(order)
    return interpolation_taps((h, w), table.row_size, side, mode, align_corners)


@dataclass(frozen=True)
class Interpolation(Buffer):
    """Position embeddings of each row, resampled from a square table, `[rows, dim]` in the dtype of the table.

    Attributes:
        name: The argument it fills.
        table: `[side * side, dim]`, row by row: a path in the module (`"pos_embed.weight"`), or a tensor.
        mode: `"bilinear"`.
        align_corners: As in `torch.nn.functional.interpolate`.
        order: How the rows of a frame are ordered.
        accum_dtype: The dtype of weights, products and sums; `None` is the table's own.
    """

    any_segments = False
    name: str = "pos_embeds"
    table: TensorSource = "pos_embed.weight"
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"
    accum_dtype: torch.dtype | None = torch.float32

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """`[rows, dim]`."""
        entries = resolve_tensor(self.table, module)
        indices, weights = _taps(table, entries.shape[0], self.mode, self.align_corners, self.order)
        return interpolate(entries, indices, weights, self.accum_dtype or entries.dtype)


@dataclass(frozen=True)
class InterpolationIndices(Buffer):
    """The table entries each row is made of, int64 `[rows, taps]`, for modules that gather for themselves.

    Attributes:
        name: The argument it fills.
        entries: How many entries the square table has.
        mode: `"bilinear"` (4 taps).
        align_corners: As in `torch.nn.functional.interpolate`.
        order: How the rows of a frame are ordered.
    """

    any_segments = False
    name: str = "interp_indices"
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """int64 `[rows, taps]`."""
        return _taps(table, self.entries, self.mode, self.align_corners, self.order)[0]


@dataclass(frozen=True)
class InterpolationWeights(Buffer):
    """How much each of those entries counts, float32 `[rows, taps]`. Attributes as in `InterpolationIndices`."""

    any_segments = False
    name: str = "interp_weights"
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """float32 `[rows, taps]`."""
        return _taps(table, self.entries, self.mode, self.align_corners, self.order)[1]
