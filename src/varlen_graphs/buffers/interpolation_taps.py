"""Indices and weights of interpolated position embeddings."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.interpolation import side_of
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.interpolation.op import interpolation_taps
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order


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
    """Weights of the entries of `InterpolationIndices`, float32 `[rows, taps]`, with the same attributes.

    Attributes:
        padding: As in `torch.nn.functional.grid_sample`: `"border"`, or `"zeros"`, where taps beyond the border of the
            table have no weight, for `"bilinear"` without `align_corners`.

    Raises:
        SpecError: As for `InterpolationIndices`, or `padding` is unknown, or `"zeros"` with another mode.
    """

    name: str = "interp_weights"
    padding: Literal["border", "zeros"] = "border"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding == "zeros" and (self.mode != "bilinear" or self.align_corners):
            raise SpecError(f"{self!r}: expected mode='bilinear' and align_corners=False with padding='zeros'")

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the weights, float32 `[rows, taps]`."""
        weights = self.taps(table)[1]
        return weights * self._inside(table) if self.padding == "zeros" else weights

    def _inside(self, table: ItemTable) -> Tensor:
        """Return True for taps inside of the table, bool `[rows, taps]`."""
        side = side_of(self.entries, self.mode)
        _, *at = table.positions(self.order)
        inside = []
        for position, size in zip(at, table.row_size, strict=True):
            low = ((position.float() + 0.5) * side / size - 0.5).floor()[:, None]
            taps = low + torch.arange(2, device=table.device)
            inside.append((taps >= 0) & (taps < side))
        return (inside[0][:, :, None] & inside[1][:, None, :]).flatten(1)
