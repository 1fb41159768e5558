"""Which rows of a padded batch are real, for modules that take a mask beside what describes the items."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.padded import check_mask_dtype, key_padding_mask


@dataclass(frozen=True)
class KeyPaddingMask(Buffer):
    """Which rows of a padded batch are real, `[batch, length]`; none of an item of padding.

    A call does not bring it. Where it does, and describes the items by it, declare `PaddedMask` as the layout instead.

    Attributes:
        name: The argument it fills.
        dtype: `torch.bool`, or integers.
        real: What marks real rows: True (1), or False (0), as in `key_padding_mask` of `torch.nn.MultiheadAttention`.
    """

    any_segments = False
    for_rows = "padded"
    name: str = "key_padding_mask"
    dtype: torch.dtype = torch.bool
    real: bool = True

    def __post_init__(self) -> None:
        check_mask_dtype(self, self.dtype)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """`[batch, length]`."""
        return key_padding_mask(table.real_rows, self.dtype, self.real)
