"""Key padding mask of a padded batch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.layouts.entry_counts import EntryCounts
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.padded import check_mask_dtype, key_padding_mask


@dataclass(frozen=True)
class Mask(Buffer):
    """Mask of the real rows of a padded batch, `[batch, length]`; padding items have no real rows.

    For modules that take a mask in addition to the argument that describes the items. If calls bring the mask and it
    describes the items, declare `Mask` as the layout instead. Prefix rows that the layout declares are real, and
    come first.

    Attributes:
        name: Argument to fill.
        dtype: `torch.bool`, or an integer dtype.
        real: Value of real rows: True (1), or False (0), as in `key_padding_mask` of `torch.nn.MultiheadAttention`.
        of_item: Maps the number of rows of an item to that of its entries where the module makes fewer or more rows of
            them, as in `Entries`. The mask is then `[batch, of_item(length)]`.

    Raises:
        SpecError: `dtype` is neither bool nor an integer dtype, or `of_item` is no function.
    """

    any_segments = False
    for_rows = "padded"
    name: str = "key_padding_mask"
    dtype: torch.dtype = torch.bool
    real: bool = True
    of_item: Callable[[int], int] | None = None
    _counts: EntryCounts | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "_counts", None if self.of_item is None else EntryCounts(self.of_item))
        check_mask_dtype(self, self.dtype)

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the mask, `[batch, length]` in `dtype`."""
        return key_padding_mask(table.real_entries(self._counts), self.dtype, self.real)
