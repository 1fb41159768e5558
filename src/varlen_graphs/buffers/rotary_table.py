"""Cosine and sine tables of rotary position embedding."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from varlen_graphs.buffers.axes import Axis, axis_names
from varlen_graphs.buffers.base import Buffer, TensorSource, resolve_tensor
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.kernels.rotary_table.op import rotary_table
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order
from varlen_graphs.layouts.segments import Windows


@dataclass(frozen=True)
class RotaryTable(Buffer):
    """Cosines and sines of the rotation of each row: a pair of float32 `[rows, 2 * axes * frequencies]`.

    Attributes:
        name: Argument to fill.
        inv_freq: Inverse frequencies `[frequencies]`: a path in the module (`"rotary_pos_emb.inv_freq"`), or a tensor.
        axes: Axes that rotate the shares of a head: `("h", "w")` gives `[fh, fw, fh, fw]`, `("row",)` plain rotary
            embedding.
        order: Order of the rows of a frame: `"raster"`, `"merge_block"`, or `Windows(side)` for the order of
            `WindowIndex`.

    Raises:
        SpecError: `axes` is empty or has an unknown axis, or `order` is unknown.
    """

    any_segments = False
    for_rows = "packed"
    name: str = "position_embeddings"
    inv_freq: TensorSource = "rotary_pos_emb.inv_freq"
    axes: tuple[Axis, ...] = ("h", "w")
    order: Order | Windows = "raster"

    def __post_init__(self) -> None:
        axis_names(self.axes)
        check_fields(self)

    def produce(self, table: ItemTable, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, float32.

        Raises:
            SpecError: `inv_freq` is not in the module.
        """
        inv_freq = resolve_tensor(self.inv_freq, module)
        if isinstance(self.order, Windows):
            merge, side = table.layout.merge, self.order.side
        else:
            merge, side = table.merge(self.order), 0
        axes, rows = axis_names(self.axes), table.budget.rows
        return cast(tuple[Tensor, Tensor], rotary_table(table.values, rows, inv_freq, axes, merge, side))
