"""Position embeddings resampled from a square table to the grid of each item."""

import math
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer, TensorSource, resolve_tensor
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.kernels.antialias.op import antialias as antialias_op
from varlen_graphs.kernels.interpolation.op import interpolate
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order
from varlen_graphs.torch_dispatch.sharded import require_replicated


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
    """Resample a square table of position embeddings to the grid of each item, and optionally add it to the rows.

    Takes one launch on CUDA for all items, without host syncs or temporaries, so it can be captured. It also works
    outside an encoder. There are no gradients.

    ```python
    table = vg.layouts.ItemTable(grid_thw, vg.budgets.Budget(len(x)), vg.GridTHW(merge=2))
    x = vg.buffers.interpolate_positions(pos_embed.weight, table, mode="bicubic", order="merge_block", add=x)
    ```

    Args:
        entries: Floating `[side * side, dim]`, the position embeddings row by row.
        table: Item table.
        mode: `"bilinear"`, or `"bicubic"` (Keys' kernel with a = -0.75).
        align_corners: As in `torch.nn.functional.interpolate`. Taps beyond the border repeat it.
        order: Order of the rows of a frame.
        accum_dtype: Dtype of weights, products and sums; `None` for the dtype of `entries`. The result is rounded to
            the dtype of `entries` before `add` is added to it.
        add: Floating `[rows, dim]` to add to, such as the embedded patches. Values of its padding rows stay in these
            rows.
        antialias: As in `torch.nn.functional.interpolate`; requires `"bilinear"` without `align_corners`. If a grid is
            smaller than the table, a row combines all entries that its patch covers. The filters are computed from the
            sizes at each call: new sizes cost no more than known ones, and weights may change.

    Returns:
        `[rows, dim]` in the dtype of `entries`; with `add` the sum, in the dtype of torch's type promotion. Without
        `add`, padding rows hold the middle of the position embeddings, or the first of them with `align_corners`, or 0
        with `antialias`.

    Raises:
        SpecError: `mode` or `order` is unknown, the number of entries is not a square, `entries` is sharded over ranks,
            or `antialias` is combined with another mode or `align_corners`.
        InputError: The shape of `add` differs from that of the result.

    Source: torch.nn.functional.interpolate, within 2e-5 in float32.
    """
    entries = require_replicated(entries, "the table of position embeddings")
    side_of(entries.shape[0], mode)
    rows = table.budget.rows
    if add is not None and add.shape != (rows, entries.shape[1]):
        raise InputError(
            f"add is {list(add.shape)}: expected [rows, dim] = {[rows, entries.shape[1]]}, with as many rows as the "
            "budget of the item table"
        )
    merge, accum_dtype = table.merge(order), accum_dtype or entries.dtype
    if antialias:
        check_antialias(mode, align_corners)
        return cast(Tensor, antialias_op(entries, table.values, rows, merge, accum_dtype, add))
    return cast(Tensor, interpolate(entries, table.values, rows, mode, align_corners, merge, accum_dtype, add))


def check_antialias(mode: Mode, align_corners: bool) -> None:
    """Check that the interpolation can be antialiased."""
    if mode != "bilinear" or align_corners:
        raise SpecError(
            f"antialias=True with mode={mode!r}, align_corners={align_corners}: expected mode='bilinear' and "
            "align_corners=False"
        )


def side_of(entries: int, mode: Mode) -> int:
    """Return the side of a square table with this number of entries, for a known `mode`."""
    if mode not in get_args(Mode):
        raise SpecError(f"mode={mode!r}: expected one of {get_args(Mode)}")
    side = math.isqrt(entries)
    if side * side != entries:
        raise SpecError(f"the position table has {entries} entries: expected a square number, side * side")
    return side


@dataclass(frozen=True)
class Interpolation(Buffer):
    """Position embeddings of each row, resampled from a square table, `[rows, dim]` in the dtype of the table.

    A custom forward can add them to its rows in the same launch with `interpolate_positions`.

    Attributes:
        name: Argument to fill.
        table: `[side * side, dim]`, row by row: a path in the module (`"pos_embed.weight"`), or a tensor.
        mode: `"bilinear"` or `"bicubic"`.
        align_corners: As in `torch.nn.functional.interpolate`.
        order: Order of the rows of a frame.
        accum_dtype: Dtype of weights, products and sums; `None` for the dtype of the table.
        antialias: As in `torch.nn.functional.interpolate`; requires `"bilinear"` without `align_corners`.

    Raises:
        SpecError: `mode` or `order` is unknown, `accum_dtype` is not a floating dtype, or `antialias` is combined with
            another mode or `align_corners`.
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

    def __post_init__(self) -> None:
        check_fields(self)
        if self.accum_dtype is not None and not self.accum_dtype.is_floating_point:
            raise SpecError(
                f"accum_dtype={self.accum_dtype}: expected a floating dtype, such as torch.float32, or None"
            )
        if self.antialias:
            check_antialias(self.mode, self.align_corners)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the position embeddings, `[rows, dim]`.

        Raises:
            SpecError: The number of entries is not a square, or `table` is not in the module.
        """
        return interpolate_positions(
            resolve_tensor(self.table, module), table, mode=self.mode, align_corners=self.align_corners,
            order=self.order, accum_dtype=self.accum_dtype, antialias=self.antialias,
        )  # fmt: skip
