"""Items on the device: one small table, and the way from a row back to its item."""

from functools import cached_property
from typing import cast, get_args

import torch
from torch import Tensor

from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.items.reference import RowItems, item_rows, locate
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.windows.op import cu_window_seqlens
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Order
from varlen_graphs.layout.padded import real_rows
from varlen_graphs.layout.segments import Per, Windows


class ItemTable:
    """The items of one replay on the device, and everything that follows from them.

    This is what a producer gets. All of it is operations on `values`, free of host syncs, so inside a captured graph it
    is computed anew at each replay from the table as it is then. Each property is computed once a forward; positions
    and `cu_seqlens` take one launch each, the properties a few torch operations.

    Attributes:
        values: int64 `[items, 3 + columns]`: `(t, h, w, *columns)`; items of padding have zeros and the columns' pads.
            Where items are grouped, the last column more is 1 for items that begin a group, and 0 for others.
        budget: The capacities; every shape below follows from them.
        layout: The declaration the items came by.

    Raises:
        InputError: `values` is no such table.
    """

    def __init__(self, values: Tensor, budget: Budget, layout: LayoutArgument) -> None:
        columns = 3 + len(layout.columns) + layout.grouped
        if not isinstance(values, Tensor) or values.dtype != torch.int64 or values.shape[1:] != (columns,):
            came = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"the item table is {came}: expected int64 [items, {columns}], for each item t, h, w and what else "
                f"{layout.name!r} describes; of an image t is 1, of an item that has a length alone t and h are"
            )
        self.values = values
        self.budget = budget
        self.layout = layout
        self._positions: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._cu_seqlens: dict[Per, Tensor] = {}
        self._query_seqlens: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.values.device

    @property
    def t(self) -> Tensor:
        """Frames of each item, int64 `[items]`; 0 in padding."""
        return self.values[:, 0]

    @property
    def h(self) -> Tensor:
        """Height of each item, int64 `[items]`; 0 in padding."""
        return self.values[:, 1]

    @property
    def w(self) -> Tensor:
        """Width of each item (or its length), int64 `[items]`; 0 in padding."""
        return self.values[:, 2]

    def column(self, name: str) -> Tensor:
        """An extra column by its name, int64 `[items]`."""
        names = [column.name for column in self.layout.columns]
        if name not in names:
            raise SpecError(f"the item table has no column {name!r}: the layout declares {names or 'none'}")
        return self.values[:, 3 + names.index(name)]

    def _check_packed(self, what: str) -> None:
        if self.layout.padded:
            raise SpecError(
                f"the item table was asked {what}, which it knows of packed rows only, but {self.layout.name!r} "
                "describes a padded batch: use real_rows, item_rows and columns, or declare a packed layout"
            )

    @cached_property
    def item_rows(self) -> Tensor:
        """Rows of each item, int64 `[items]`; 0 in padding."""
        return item_rows(self.values)

    @cached_property
    def item_ends(self) -> Tensor:
        """The row after each item's last, int64 `[items]`."""
        self._check_packed("where items begin and end")
        return self.item_rows.cumsum(0)

    @cached_property
    def item_starts(self) -> Tensor:
        """Each item's first row, int64 `[items]`."""
        return self.item_ends - self.item_rows

    @cached_property
    def active_rows(self) -> Tensor:
        """The number of active rows, int64 `[1]`."""
        return self.item_ends[-1:]

    @cached_property
    def row(self) -> Tensor:
        """The index of each row, int64 `[rows]`."""
        return torch.arange(self.budget.rows, device=self.device)

    @cached_property
    def real_rows(self) -> Tensor:
        """Whether each row of a padded batch belongs to its item, bool `[items, max_seqlen]`."""
        return real_rows(self.item_rows, self.budget.max_seqlen)

    @cached_property
    def _row_items(self) -> RowItems:
        self._check_packed("which item each row belongs to")
        return locate(self.values, self.budget.rows)

    @property
    def row_active(self) -> Tensor:
        """Whether a row belongs to an item, bool `[rows]`."""
        return self._row_items.active

    @property
    def row_item(self) -> Tensor:
        """The item of each row, int64 `[rows]`; a valid but arbitrary index in padding."""
        return self._row_items.item

    @property
    def row_in_item(self) -> Tensor:
        """How many rows of the same item come before each row, int64 `[rows]`; 0 in padding."""
        return self._row_items.within

    @cached_property
    def row_size(self) -> tuple[Tensor, Tensor]:
        """Height and width of the item of each row, int64 `[rows]` each; at least 1, also in padding."""
        return self.h[self.row_item].clamp(min=1), self.w[self.row_item].clamp(min=1)

    def merge(self, order: Order) -> int:
        """The side of the blocks in which the rows of a frame come: the merge size of the layout, or 1 in raster order.

        Raises:
            SpecError: There is no such order.
        """
        if order not in get_args(Order):
            raise SpecError(f"order={order!r}: expected one of {get_args(Order)}")
        return self.layout.merge if order == "merge_block" else 1

    def positions(self, order: Order) -> tuple[Tensor, Tensor, Tensor]:
        """Where each row lies in its item: `(t, h, w)`, int64 `[rows]` each; 0 in padding.

        Args:
            order: How the rows of a frame are ordered; `"merge_block"` uses the merge size of the layout.
        """
        if order not in self._positions:
            self._check_packed("where rows lie in their item")
            at = positions(self.values, self.budget.rows, "t h w", self.merge(order))
            self._positions[order] = at.unbind(-1)
        return self._positions[order]

    def cu_seqlens(self, per: Per) -> Tensor:
        """Where segments begin, int32 `[segments + 1]`: starts at 0, and the tail repeats the number of active rows."""
        per = "item" if per == "clip" else per
        if per not in self._cu_seqlens:
            self._check_packed("where segments begin")
            self._cu_seqlens[per] = self._segment_starts(per)
        return self._cu_seqlens[per]

    def query_seqlens(self, queries: int) -> Tensor:
        """Where the queries of each segment begin, of `items * queries` in all: int32 `[segments + 1]`."""
        if queries not in self._query_seqlens:
            starts = torch.arange(
                0, (self.budget.segments + 1) * queries, queries, dtype=torch.int32, device=self.device
            )
            self._query_seqlens[queries] = starts.clamp(max=self.budget.items * queries)
        return self._query_seqlens[queries]

    def _segment_starts(self, per: Per) -> Tensor:
        if isinstance(per, Windows):
            side = per.side * self.layout.merge
            return cast(Tensor, cu_window_seqlens(self.values, self.budget.segments, side))
        if per == "group":
            if not self.layout.grouped:
                raise SpecError(
                    f"the item table was asked where groups begin, which {self.layout.name!r} does not describe: "
                    "declare a NestedColumn that tells them"
                )
            return cast(Tensor, cu_seqlens(self.values, self.budget.segments, False, self.values.shape[1] - 1))
        return cast(Tensor, cu_seqlens(self.values, self.budget.segments, per == "frame"))

    def max_seqlen(self, per: Per) -> int:
        """The most rows a segment may have: the budget's `max_seqlen`, or those of a window, if they are fewer."""
        most = self.budget.max_seqlen
        return min(most, (per.side * self.layout.merge) ** 2) if isinstance(per, Windows) else most
