"""Items on the device: one small table, and the tensors computed from it."""

from collections.abc import Collection
from functools import cached_property
from typing import cast, get_args

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.items.reference import RowItems, item_rows, locate_between
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.windows.op import cu_window_seqlens
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.entry_counts import EntryCounts
from varlen_graphs.layouts.items import Order
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.layouts.segments import Per, Windows


class ItemTable:
    """Items of one replay on the device, and the tensors computed from them.

    Buffers receive this table. All properties are operations on `values` without host syncs, so a captured graph
    recomputes them at each replay from the current table. Each property is computed at most once per forward; positions
    and `cu_seqlens` take one launch each, the other properties a few torch operations.

    Attributes:
        values: int64 `[items, 3 + columns]`: `(t, h, w, *columns)`; padding items hold zeros and the `pad` of each
            column. If items are grouped, one more column at the end holds 1 for items that start a group, else 0.
        budget: Capacities, which fix every shape below.
        layout: Layout argument that describes the items.
        counted: The kinds of segments that budgets have room for, by the declaration; `None` if that is not known.

    Raises:
        InputError: `values` is not such a table.
    """

    def __init__(
        self, values: Tensor, budget: Budget, layout: LayoutArgument, counted: Collection[Per] | None = None
    ) -> None:
        columns = 3 + len(layout.columns) + layout.grouped
        if not isinstance(values, Tensor) or values.dtype != torch.int64 or values.shape[1:] != (columns,):
            came = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"the item table is {came}: expected int64 [items, {columns}], with t, h, w and the columns of "
                f"{layout.name!r} for each item; t is 1 for an image, t and h are 1 for an item with only a length"
            )
        self.values = values
        self.budget = budget
        self.layout = layout
        self.counted = counted
        self._positions: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._cu_seqlens: dict[Per, Tensor] = {}
        self._query_seqlens: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.values.device

    @property
    def t(self) -> Tensor:
        """Number of frames of each item, int64 `[items]`; 0 in padding."""
        return self.values[:, 0]

    @property
    def h(self) -> Tensor:
        """Height of each item, int64 `[items]`; 0 in padding."""
        return self.values[:, 1]

    @property
    def w(self) -> Tensor:
        """Width (or length) of each item, int64 `[items]`; 0 in padding."""
        return self.values[:, 2]

    def column(self, name: str) -> Tensor:
        """Return an extra column by its name, int64 `[items]`.

        Raises:
            SpecError: The layout declares no column of this name.
        """
        names = [column.name for column in self.layout.columns]
        if name not in names:
            raise SpecError(f"the item table has no column {name!r}: the layout declares {names or 'none'}")
        return self.values[:, 3 + names.index(name)]

    def _check_packed(self, what: str) -> None:
        if self.layout.padded:
            raise SpecError(
                f"{what} is defined for packed rows only, but {self.layout.name!r} describes a padded batch: use "
                "real_rows, item_rows or a column instead, or declare a layout of packed rows"
            )

    @cached_property
    def item_rows(self) -> Tensor:
        """Number of rows of each item, int64 `[items]`; 0 in padding."""
        return item_rows(self.values)

    @cached_property
    def item_ends(self) -> Tensor:
        """Row after the last of each item, int64 `[items]`."""
        self._check_packed("the row range of each item")
        return self.item_rows.cumsum(0)

    @cached_property
    def item_starts(self) -> Tensor:
        """First row of each item, int64 `[items]`."""
        return self.item_ends - self.item_rows

    @cached_property
    def active_rows(self) -> Tensor:
        """Number of active rows, int64 `[1]`."""
        return self.item_ends[-1:]

    @cached_property
    def row(self) -> Tensor:
        """Index of each row, int64 `[rows]`."""
        return torch.arange(self.budget.rows, device=self.device)

    @cached_property
    def real_rows(self) -> Tensor:
        """Mask of the rows of a padded batch that belong to an item, bool `[items, max_seqlen]`."""
        return real_rows(self.item_rows, self.budget.max_seqlen)

    def real_entries(self, counts: EntryCounts | None = None) -> Tensor:
        """Return a mask of the real entries of a padded batch, prefix rows first, bool `[items, prefix + length]`.

        Each item has an entry a row, or as many as `counts` says.
        """
        lengths, prefix, most = self.item_rows, self.layout.prefix, self.budget.max_seqlen
        if counts is not None:
            lengths, most = counts.lookup(lengths, most), counts(most)
        if prefix:
            lengths = lengths + prefix * (self.item_rows > 0)
        return real_rows(lengths, most + prefix)

    @cached_property
    def _row_items(self) -> RowItems:
        self._check_packed("the item of each row")
        return locate_between(self.item_starts, self.item_ends, self.row, self.row_active)

    @cached_property
    def row_active(self) -> Tensor:
        """Mask of the rows that belong to an item, bool `[rows]`."""
        return self.row < self.active_rows

    @property
    def row_item(self) -> Tensor:
        """Item of each row, int64 `[rows]`; a valid but arbitrary index in padding."""
        return self._row_items.item

    @property
    def row_in_item(self) -> Tensor:
        """Index of each row within its item, int64 `[rows]`; 0 in padding."""
        return self._row_items.within

    @cached_property
    def row_places(self) -> Tensor:
        """Place of each row behind the prefix rows of its item and of those before, int64 `[rows]`."""
        before = torch.where(self.row_active, self.row_item + 1, (self.item_rows > 0).sum())
        return self.row + self.layout.prefix * before

    @cached_property
    def prefix_places(self) -> Tensor:
        """Place of the prefix rows of each item, int64 `[items, prefix]`; valid, but those of others, in padding."""
        own = torch.arange(self.layout.prefix, device=self.device)
        item = torch.arange(len(self.values), device=self.device)
        return (self.item_starts + self.layout.prefix * item)[:, None] + own

    @property
    def rows_with_prefix(self) -> int:
        """Number of rows that the module has at the budget, with the prefix rows of all items."""
        return self.budget.rows + self.budget.items * self.layout.prefix

    @cached_property
    def row_size(self) -> tuple[Tensor, Tensor]:
        """Height and width of the item of each row, int64 `[rows]` each; at least 1, also in padding."""
        return self.h[self.row_item].clamp(min=1), self.w[self.row_item].clamp(min=1)

    def merge(self, order: Order) -> int:
        """Return the side of the blocks that order the rows of a frame: the layout's merge size, or 1 for raster order.

        Raises:
            SpecError: `order` is unknown.
        """
        if order not in get_args(Order):
            raise SpecError(f"order={order!r}: expected one of {get_args(Order)}")
        return self.layout.merge if order == "merge_block" else 1

    def positions(self, order: Order) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coordinates of each row in its item: `(t, h, w)`, int64 `[rows]` each; 0 in padding.

        Raises:
            SpecError: `order` is unknown, or the rows are a padded batch.
        """
        if order not in self._positions:
            self._check_packed("the position of each row in its item")
            at = positions(self.values, self.budget.rows, "t h w", self.merge(order))
            self._positions[order] = at.unbind(-1)
        return self._positions[order]

    def cu_seqlens(self, per: Per) -> Tensor:
        """Return cumulative segment lengths, int32 `[segments + 1]`; the tail repeats the number of active rows.

        Segments include the prefix rows that the layout declares.

        Raises:
            SpecError: The layout has no segments of this kind, or prefix rows, which only items have; or the rows are
                a padded batch; or no buffer counts such segments, of which a budget may then have too few.
        """
        per = "item" if per == "clip" else per
        if per not in self._cu_seqlens:
            self._check_packed("cu_seqlens")
            self._check_counted(per)
            if self.layout.prefix and per != "item":
                raise SpecError(
                    f"cu_seqlens({per!r}): expected 'item', because {self.layout.name!r} declares prefix rows, which "
                    "each item has once"
                )
            starts = self._segment_starts(per)
            if self.layout.prefix:
                before = torch.arange(len(starts), dtype=torch.int32, device=self.device)
                starts = starts + self.layout.prefix * before.minimum((self.item_rows > 0).sum(dtype=torch.int32))
            self._cu_seqlens[per] = starts
        return self._cu_seqlens[per]

    def _check_counted(self, per: Per) -> None:
        """Check that budgets have room for such segments: an item has one frame or more, and a frame one window."""
        per = "item" if per == "frame" and not self.layout.has_frames else per
        counted = () if self.counted is None else self.counted
        if self.counted is None or per in counted:
            return
        cut = any(isinstance(kind, Windows) for kind in counted)
        if isinstance(per, Windows) or not (cut if per == "frame" else counted):
            instead = "" if isinstance(per, Windows) else ", or leave out any_segments=False"
            raise SpecError(
                f"cu_seqlens({per!r}): budgets have no room for such segments, because no buffer counts them: declare "
                f"CuSeqlens(per={per!r}){instead}"
            )

    def query_seqlens(self, queries: int) -> Tensor:
        """Return cumulative query counts, `queries` per segment up to `items * queries`: int32 `[segments + 1]`."""
        if queries not in self._query_seqlens:
            end = (self.budget.segments + 1) * queries
            starts = torch.arange(0, end, queries, dtype=torch.int32, device=self.device)
            self._query_seqlens[queries] = starts.clamp(max=self.budget.items * queries)
        return self._query_seqlens[queries]

    def _segment_starts(self, per: Per) -> Tensor:
        if isinstance(per, Windows):
            side = per.side * self.layout.merge
            return cast(Tensor, cu_window_seqlens(self.values, self.budget.segments, side))
        if per == "group":
            if not self.layout.grouped:
                raise SpecError(
                    f"cu_seqlens(per='group') needs groups of items, which {self.layout.name!r} does not describe: "
                    "expected a layout with a NestedColumn; declare one, or use per='item'"
                )
            return cast(Tensor, cu_seqlens(self.values, self.budget.segments, False, self.values.shape[1] - 1))
        return cast(Tensor, cu_seqlens(self.values, self.budget.segments, per == "frame"))

    def max_seqlen(self, per: Per) -> int:
        """Return the upper bound of segment lengths: with the prefix rows of an item, or that of a window."""
        most = self.budget.max_seqlen + self.layout.prefix
        return min(most, (per.side * self.layout.merge) ** 2) if isinstance(per, Windows) else most
