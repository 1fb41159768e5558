"""Masks of the keys that each query may attend to."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from varlen_graphs.attention.api import Window
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.entry_counts import EntryCounts
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per


@dataclass(frozen=True)
class AttentionMask(Buffer):
    """Mask of the keys that each query may attend to, for modules with dense attention that take it as it is.

    `[batch, 1, length, length]` for a padded batch, `[1, 1, rows, rows]` for packed rows: its memory grows with the
    square. Rows attend to the rows of their segment, as far as `causal` and `window` allow. A module uses the mask in
    place of its own, so declare what the module does by itself: transformers drops the windows and the causality of a
    model that gets a mask of four dimensions without them.

    A padding row attends to itself: without any key, its softmax would be NaN, which the next layer would multiply by
    0. For the same reason, floating padding of packed rows is filled with `pad` before the module gets it.

    Attributes:
        name: Argument to fill.
        per: Kind of segment whose rows attend to each other: `"item"`; for packed rows also `"frame"`, `"clip"`,
            `"group"`, or `Windows(side)` for rows in the order of `WindowIndex`.
        causal: If True, a query sees no key after its own position. Overrides the right side of `window`.
        window: Number of keys before and after its own position that a query sees, `(left, right)`; -1 means all. With
            `sliding_window=w` of transformers: `(w, w)` where the model is bidirectional, and `(w - 1, 0)` where it is
            causal.
        dtype: `torch.bool`: True where a query may attend. A floating dtype: 0 where it may, elsewhere the lowest
            number of the dtype, to be added to scores. `None` for the dtype of the module's first floating
            matrix.
        of_item: In a padded batch, maps the number of rows of an item to that of its entries where the module makes
            fewer or more rows of them, as in `Entries`. The mask is then that of `of_item(length)` entries.

    Prefix rows that the layout declares come first in each item, and count as rows of it.

    Raises:
        SpecError: `window` is not two integers of at least -1, `dtype` is neither bool nor a floating dtype, or
            `of_item` is no function.
    """

    any_segments = False
    clears_padding = True
    name: str = "attention_mask"
    per: Per = "item"
    causal: bool = False
    window: Window = (-1, -1)
    dtype: torch.dtype | None = torch.bool
    of_item: Callable[[int], int] | None = None
    _counts: EntryCounts | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "_counts", None if self.of_item is None else EntryCounts(self.of_item))
        if len(self.window) != 2 or min(self.window) < -1:
            raise SpecError(
                f"{self!r}: expected window=(left, right), the numbers of keys before and after its own position that "
                "a query sees, with -1 for all"
            )
        if self.dtype not in (None, torch.bool) and not (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            raise SpecError(
                f"{self!r}: expected torch.bool, a floating dtype of 16 bits or more, or None for that of the module; "
                "for a mask [batch, length] of integers declare buffers.Mask"
            )

    def produce(self, table: ItemTable, module: nn.Module) -> Tensor:
        """Return the mask, `[batch, 1, length, length]` or `[1, 1, rows, rows]`."""
        spans = self._spans(table)
        row = torch.arange(spans.shape[1], device=table.device)
        left, right = (self.window[0], 0) if self.causal else self.window
        allowed = spans[:, None, :, None] == spans[:, None, None, :]
        after = row - row[:, None]
        if left >= 0:
            allowed &= after >= -left
        if right >= 0:
            allowed &= after <= right
        dtype = module_dtype(module) if self.dtype is None else self.dtype
        if dtype == torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    def _spans(self, table: ItemTable) -> Tensor:
        """Return integers `[batch, length]` or `[1, rows]`, equal for rows of a segment, unique for padding rows."""
        if table.layout.padded:
            real = table.real_entries(self._counts)
            return torch.where(real, 0, -1 - torch.arange(real.shape[1], device=table.device))
        starts = table.cu_seqlens(self.per)
        row = torch.arange(table.rows_with_prefix, dtype=starts.dtype, device=table.device)
        segment = torch.searchsorted(starts[1:], row, right=True, out_int32=True)
        return torch.where(row < starts[-1:], segment, -1 - row)[None]
