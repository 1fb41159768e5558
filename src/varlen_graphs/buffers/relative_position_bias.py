"""Learned biases of attention scores by relative position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names, axis_size
from varlen_graphs.buffers.base import Buffer, TensorSource, resolve_tensor
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order
from varlen_graphs.torch_dispatch.sharded import require_replicated


@dataclass(frozen=True)
class RelativePositionBias(Buffer):
    """Biases of attention scores, looked up in a learned table by the position of the key relative to the query.

    `[1, heads, length, length]` for a padded batch, `[1, heads, rows, rows]` for packed rows, in the dtype of the
    table: its memory grows with the square. It masks nothing: add an `AttentionMask` of a floating dtype to it, or pass
    both. Rows of different items count as if they had one position, so that `index` sees no offsets but those within an
    item. Floating padding of packed rows is filled with `pad`, as with `AttentionMask`.

    Attributes:
        name: Argument to fill.
        table: Floating `[buckets, heads]`: a path in the module (`"relative_attention_bias.weight"`), or a tensor.
        index: Maps offsets, key minus query, to rows of the table: `T5Buckets(...)`, `GridOffsets(...)`, or a function
            of one int64 tensor for each axis that returns integers of the same shape, by tensor operations only. The
            bias is NaN where they are not in the table.
        axes: Axes of the positions: `("row",)`, or for packed rows of grids also `("h", "w")`.
        order: Order of the rows of a frame: `"raster"`, or `"merge_block"` with the merge size of the layout.
        largest: Largest size of an item along the axes for which the table has entries. A call with a larger item
            raises a `LayoutError`. `None` if `index` maps all offsets.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, `order` is unknown, or `largest` is below 1.
    """

    any_segments = False
    clears_padding = True
    name: str
    table: TensorSource
    index: Callable[..., Tensor]
    axes: tuple[Axis, ...] = ("row",)
    order: Order = "raster"
    largest: int | None = None

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)
        if self.largest is not None:
            check_at_least(self, 1, "largest")

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the biases, `[1, heads, length, length]` or `[1, heads, rows, rows]`.

        Raises:
            SpecError: The table is not in the module, not floating `[buckets, heads]`, or sharded over ranks; `index`
                returned something other than integers of the shape of its arguments; or the batch is padded and `axes`
                is not `("row",)`.
        """
        biases = require_replicated(resolve_tensor(self.table, module), f"the table of {self.name!r}")
        if biases.dim() != 2 or not biases.is_floating_point():
            raise SpecError(
                f"the table of {self.name!r} is {biases.dtype} {list(biases.shape)}: expected a floating tensor "
                "[buckets, heads]"
            )
        offsets = self._offsets(table)
        index = self.index(*offsets)
        if index.shape != offsets[0].shape or index.is_floating_point():
            raise SpecError(
                f"the function index of {self.name!r} returned {index.dtype} {list(index.shape)}: expected integers of "
                f"the shape of the offsets, {list(offsets[0].shape)}"
            )
        known = (index >= 0) & (index < biases.shape[0])
        found = biases[torch.where(known, index, 0).long()].permute(2, 0, 1)
        return torch.where(known, found, torch.nan)[None].contiguous()

    def size(self, item: Sequence[int]) -> int:
        """Return the largest size of an item along the axes."""
        return max(axis_size(item, axis) for axis in self.axes)

    def _offsets(self, table: ItemTable) -> list[Tensor]:
        """Return the positions of keys minus those of queries, int64 `[rows, rows]` for each axis."""
        if table.layout.padded:
            if self.axes != ("row",):
                raise SpecError(f"{self!r}: expected axes=('row',) in a padded batch")
            at = torch.arange(table.budget.max_seqlen, device=table.device)[:, None]
            offsets = [axis - axis[:, None] for axis in at.unbind(-1)]
        else:
            names, merge = axis_names(self.axes), table.merge(self.order)
            at = cast(Tensor, positions(table.values, table.budget.rows, names, merge))
            in_item = table.row_item == table.row_item[:, None]
            offsets = [torch.where(in_item, axis - axis[:, None], 0) for axis in at.unbind(-1)]
        if self.largest is None:
            return offsets
        return [axis.clamp(1 - self.largest, self.largest - 1) for axis in offsets]  # beyond it only in padding
