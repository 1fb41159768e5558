"""Position embeddings resampled from a square table to the grid of each item."""

import math
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer, TensorSource, resolve_tensor
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.kernels.antialias.op import antialias as antialias_op
from varlen_graphs.kernels.interpolation.op import interpolate, interpolation_taps
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order
from varlen_graphs.watch.sharded import require_replicated


def interpolate_positions(
    entries: Tensor,
    table: ItemTable,
    *,
    mode: Mode = "bilinear",
    align_corners: bool = False,
    order: Order = "raster",
    accum_dtype: torch.dtype | None = torch.float32,
    add: Tensor | None = None,
    antialias: bool = False,
) -> Tensor:
    """A square table of position embeddings, resampled to the grid of each item and added to the rows.

    One launch on CUDA, for all items, without a host sync or a temporary: it can be captured, and used alone. For
    inference: there are no gradients.

    ```python
    table = vg.layout.ItemTable(grid_thw, vg.Budget(len(x)), vg.GridTHW(merge=2))
    x = vg.buffers.interpolate_positions(pos_embed.weight, table, mode="bicubic", order="merge_block", add=x)
    ```

    Args:
        entries: The position embeddings, `[side * side, dim]`, row by row.
        table: The items.
        mode: `"bilinear"`, or `"bicubic"` (Keys' kernel with a = -0.75).
        align_corners: As in `torch.nn.functional.interpolate`. Taps beyond the border repeat it.
        order: How the rows of a frame are ordered.
        accum_dtype: The dtype of weights, products and sums; `None` is that of `entries`. The result is rounded to the
            dtype of `entries` before anything is added to it.
        add: `[rows, dim]`, such as the embedded patches. What a padding row of it holds stays in that row.
        antialias: As in `torch.nn.functional.interpolate`, of `"bilinear"` without `align_corners`: where a grid is
            smaller than the table, a row takes all entries that its patch covers. The filters are computed from the
            sizes, so a size never seen before costs what a known one costs, and weights may change.

    Returns:
        `[rows, dim]` in the dtype of `entries`; with `add` the sum, in the dtype torch gives it. Padding rows without
        `add` hold the middle of the position embeddings, or with `align_corners` the first of them; with `antialias` 0.

    Raises:
        SpecError: An unknown mode or order, a number of entries that is no square, or `antialias` of another mode.
        InputError: `add` has another shape than the result.

    Source: torch.nn.functional.interpolate, within 2e-5 in float32.
    """
    entries = require_replicated(entries, "the table of position embeddings")
    _side(entries.shape[0], mode)
    rows = table.budget.rows
    if add is not None and add.shape != (rows, entries.shape[1]):
        raise InputError(
            f"add is {list(add.shape)}: expected [rows, dim] = {[rows, entries.shape[1]]}, with as many rows as the "
            "budget of the item table"
        )
    merge, accum_dtype = table.merge(order), accum_dtype or entries.dtype
    if antialias:
        if mode != "bilinear" or align_corners:
            raise SpecError(
                f"antialias=True with mode={mode!r}, align_corners={align_corners}: expected mode='bilinear' and "
                "align_corners=False"
            )
        return cast(Tensor, antialias_op(entries, table.values, rows, merge, accum_dtype, add))
    return cast(Tensor, interpolate(entries, table.values, rows, mode, align_corners, merge, accum_dtype, add))


def _side(entries: int, mode: Mode) -> int:
    """The side of a square table, after a check of it and of the mode."""
    if mode not in get_args(Mode):
        raise SpecError(f"mode={mode!r}: expected one of {get_args(Mode)}")
    side = math.isqrt(entries)
    if side * side != entries:
        raise SpecError(f"the position table has {entries} entries: expected a square number, side by side rows")
    return side


def _taps(table: ItemTable, entries: int, mode: Mode, align_corners: bool, order: Order) -> tuple[Tensor, Tensor]:
    side, merge = _side(entries, mode), table.merge(order)
    taps = interpolation_taps(table.values, table.budget.rows, side, mode, align_corners, merge)
    return cast(tuple[Tensor, Tensor], taps)


@dataclass(frozen=True)
class Interpolation(Buffer):
    """Position embeddings of each row, resampled from a square table, `[rows, dim]` in the dtype of the table.

    A forward of your own adds them to its rows in the same launch with `interpolate_positions`.

    Attributes:
        name: The argument it fills.
        table: `[side * side, dim]`, row by row: a path in the module (`"pos_embed.weight"`), or a tensor.
        mode: `"bilinear"` or `"bicubic"`.
        align_corners: As in `torch.nn.functional.interpolate`.
        order: How the rows of a frame are ordered.
        accum_dtype: The dtype of weights, products and sums; `None` is the table's own.
        antialias: As in `torch.nn.functional.interpolate`, of `"bilinear"` without `align_corners`.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "pos_embeds"
    table: TensorSource = "pos_embed.weight"
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"
    accum_dtype: torch.dtype | None = torch.float32
    antialias: bool = False

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """`[rows, dim]`."""
        entries = resolve_tensor(self.table, module)
        return interpolate_positions(
            entries,
            table,
            mode=self.mode,
            align_corners=self.align_corners,
            order=self.order,
            accum_dtype=self.accum_dtype,
            antialias=self.antialias,
        )


@dataclass(frozen=True)
class InterpolationIndices(Buffer):
    """The table entries each row is made of, int64 `[rows, taps]`, for modules that gather for themselves.

    Attributes:
        name: The argument it fills.
        entries: How many entries the square table has.
        mode: `"bilinear"` (4 taps) or `"bicubic"` (16).
        align_corners: As in `torch.nn.functional.interpolate`.
        order: How the rows of a frame are ordered.
    """

    any_segments = False
    for_rows = "packed"
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
    for_rows = "packed"
    name: str = "interp_weights"
    entries: int = 2304
    mode: Mode = "bilinear"
    align_corners: bool = False
    order: Order = "raster"

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """float32 `[rows, taps]`."""
        return _taps(table, self.entries, self.mode, self.align_corners, self.order)[1]
