"""The declaration of a module."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import AttentionMask, AttentionSchedule, Buffer, CuSeqlens, HostBuffer, MaxSeqlen
from varlen_graphs.declaration.checks import check_names, check_rows, check_segments, check_types
from varlen_graphs.declaration.rows_form import PicturesForm, RowsForm
from varlen_graphs.declaration.static_args import StaticKey, static_key
from varlen_graphs.inputs.extra import Input, PerItem
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.arguments import BATCH_IS, LayoutArgument
from varlen_graphs.layouts.entry_counts import EntryCounts
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.layouts.pictures import Pictures
from varlen_graphs.layouts.samples import sample_layout
from varlen_graphs.layouts.segments import Per
from varlen_graphs.layouts.usage import UsageMeter
from varlen_graphs.outputs.batch_rows import AS_ROWS, BatchRows
from varlen_graphs.outputs.declared import Declared, each_extent, extents
from varlen_graphs.outputs.entries import CountedEntries, Entries, Extent, FrameRows, Groups, Rows
from varlen_graphs.outputs.prefixed_rows import PrefixedRows

ROWS = Rows()
BATCH_ROWS = BatchRows(ROWS)

MOST_SHORT = 1 << 16
"""Rows below which an item has entries, if any has: the front end of wav2vec 2 needs 400."""


@dataclass(frozen=True)
class BufferSpec:
    """The declaration of a module: the argument with the rows, the one that describes the items, what follows from it.

    Attributes:
        rows: The argument with the packed rows: a name, or a `vg.inputs.Rows`.
        layout: The argument that describes the items: `GridTHW`, `GridHW` or `Lengths` for packed rows, `Mask` or
            `Lengths(padded=True)` for a padded batch, `Mask(packed=True)` for one to pack, `PictureSizes` or
            `PictureMask` for padded pictures. The module itself need not take it. Or `Batch()`: items of one size.
        buffers: Arguments computed from the items, inside the graph.
        outputs: The outputs: `Rows()` for tensors with an entry a row, `Rows(every=4)`, `Items(rows=64)`; for outputs
            with several parts `Fields(...)`, a dict or a tuple of these.
        inputs: Tensors that calls bring beside the rows: `PerRow`, `PerItem` and `PerCall`.
        ignored: Names of arguments that calls may bring, but that the module does not use: no run gets them.
        min_rows: Rows of the smallest item that graphs take, for a module that needs so many of each, such as those of
            k nearest neighbours. Calls with a smaller one run eager; the host has to see the items, which syncs if they
            are on the GPU.
        declared_by: `"recipe"` if others than those who call the encoder wrote the declaration. Then errors advise
            nothing to declare; and where `forward=` was found to compute something other than the module, the module
            itself answers, with a warning. For `"user"` that raises `SpecError`, because only they know which of the
            two is right.

    Raises:
        SpecError: Something else in the place of a declaration or a name, one name declared twice, a segment kind the
            layout does not have, or a buffer or output ratio that does not suit the rows.
    """

    rows: str | InputRows
    layout: LayoutArgument
    buffers: Sequence[Buffer | HostBuffer] = ()
    outputs: Declared = field(default_factory=Rows)
    inputs: Sequence[Input] = ()
    ignored: Sequence[str] = ()
    min_rows: int = 1
    declared_by: Literal["user", "recipe"] = "user"

    def __post_init__(self) -> None:
        check_types(self)
        check_names(self)
        check_rows(self)
        check_segments(self)

    def __getstate__(self) -> dict[str, Any]:
        return {own.name: getattr(self, own.name) for own in fields(self)}  # without what was computed from them

    def advice(self, declares: str, uses: str) -> str:
        """Return what to try: for those who declare the module themselves, or for those who use a recipe."""
        return declares if self.declared_by == "user" else uses

    @cached_property
    def row_input(self) -> InputRows:
        """The rows, as a `vg.inputs.Rows`."""
        return InputRows(self.rows) if isinstance(self.rows, str) else self.rows

    @cached_property
    def describing(self) -> list[str]:
        """Names of the arguments that describe the items: the layout, the columns, and the mask of a batch to pack."""
        columns = [column.name for column in self.layout.columns if column.function is None]
        mask = [self.row_input.padded_by] if self.row_input.padded_by else []
        return [*[self.layout.name] * self.layout.has_argument, *columns, *mask]

    @cached_property
    def mask(self) -> Mask | None:
        """The mask of a batch to pack, if calls bring one."""
        if self.row_input.padded_by is not None:
            return Mask(self.row_input.padded_by)
        return self.layout if isinstance(self.layout, Mask) and self.layout.packed else None

    @cached_property
    def input_extents(self) -> list[tuple[Input, Extent]]:
        """The tensors beside the rows, with the extents in which graphs read them."""
        return [(one, one.extent(self.row_extent)) for one in self.inputs]

    @cached_property
    def packs(self) -> bool:
        """True if calls bring a padded batch that is packed on its way in."""
        return self.layout.packed or self.row_input.padded_by is not None

    @cached_property
    def batched(self) -> bool:
        """True if calls bring a padded batch, packed on its way in or not."""
        return self.layout.padded or self.packs

    @cached_property
    def call_extent(self) -> Extent:
        """Extent of the rows that calls bring."""
        return BATCH_ROWS if self.batched else ROWS

    @cached_property
    def rows_form(self) -> RowsForm:
        """Form of the rows that calls bring."""
        if isinstance(self.layout, Pictures):
            return PicturesForm(self.row_input)
        return RowsForm(self.row_input, ("batch",) if self.layout.one_row else self.call_extent.dims)

    @property
    def call_rows_are(self) -> str:
        """Arrangement of a call's rows, for messages."""
        rows_are = BATCH_IS if self.row_input.padded_by else self.layout.rows_are
        return self.advice(rows_are, rows_are.partition(";")[0])  # behind it stands what to declare instead

    @cached_property
    def row_extent(self) -> Extent:
        """Extent of the rows that the module gets, and of outputs declared as `Rows()`."""
        return BATCH_ROWS if self.layout.padded else ROWS

    @cached_property
    def declared(self) -> Declared:
        """The outputs, with the extents that they have for this layout."""
        return each_extent(self.outputs, self._extent)

    def _extent(self, extent: Extent) -> Extent:
        prefix, padded = self.layout.prefix, self.layout.padded
        if isinstance(extent, Rows) and extent.prefix:
            if not padded:
                return PrefixedRows(extent, prefix, extent.rows_dim)
            returned, only = EntryCounts(lambda rows: rows + prefix), EntryCounts(lambda rows: prefix)
            counts = {"kept": returned, "dropped": AS_ROWS, "only": only}[extent.prefix]
            return BatchRows(extent, returned, counts, prefix if extent.prefix == "dropped" else 0)
        if isinstance(extent, Entries) and extent.at_budget is None:
            counts = EntryCounts(extent.of_item)
            return BatchRows(extent, counts, counts)
        if isinstance(extent, Rows) and padded:
            counts = AS_ROWS if extent.every == 1 else EntryCounts(lambda rows: rows // extent.every)
            return BatchRows(extent, counts, counts)
        return extent

    def argument_shape(self, layout: Layout, example: Tensor) -> list[int]:
        """Return the shape of the rows argument for these items, with entries as in `example`."""
        return self.row_input.argument_shape(
            self.row_extent.size(ItemSlice.of(layout)), self.row_extent.rest(example.shape)
        )

    @cached_property
    def host_buffers(self) -> list[HostBuffer]:
        """Buffers that the host computes for each replay."""
        return [buffer for buffer in self.buffers if isinstance(buffer, HostBuffer)]

    @cached_property
    def counts_entries(self) -> bool:
        """True if the size of some output depends on each item."""
        return any(isinstance(extent, CountedEntries | Groups) for extent in extents(self.declared))

    @cached_property
    def changes_outputs(self) -> bool:
        """True if graphs, and eager runs, clear or drop entries of what the module returns."""
        return bool(self.counts_entries or self.layout.padded or self.layout.prefix)

    @cached_property
    def needs_layout(self) -> bool:
        """True if the host has to see the items, even where they are described on the GPU."""
        columns = any(column.function is not None for column in self.layout.columns)
        on_host = bool(self.host_buffers or self.packs or self.layout.grouped) or self.min_rows > self.row_multiple
        return on_host or columns or self.counts_entries

    @cached_property
    def segmented(self) -> list[AttentionMask | AttentionSchedule | CuSeqlens | MaxSeqlen | HostBuffer]:
        """Buffers that describe segments of one kind."""
        kinds = AttentionMask | AttentionSchedule | CuSeqlens | MaxSeqlen | HostBuffer
        return [buffer for buffer in self.buffers if isinstance(buffer, kinds) and buffer.per is not None]

    @cached_property
    def clears_padding(self) -> bool:
        """True if floating padding of packed rows must not reach the module."""
        return not self.layout.padded and any(isinstance(b, Buffer) and b.clears_padding for b in self.buffers)

    @cached_property
    def usage(self) -> UsageMeter:
        """The capacity that items use, by the kinds of segments that some buffer uses, or may use."""
        kinds: set[Per] = {buffer.per for buffer in self.segmented if buffer.per is not None}
        if self.layout.padded:
            kinds.add("item")  # each takes a place of the batch, and none is longer
        if any(buffer.any_segments for buffer in self.buffers):
            kinds |= {"item", "frame"} if self.layout.has_frames else {"item"}
            kinds |= {"group"} if self.layout.grouped else set()
        return UsageMeter(self.layout, kinds)

    def item_table(self, values: Tensor, budget: Budget) -> ItemTable:
        """Return the table of items at a budget."""
        return ItemTable(values, budget, self.layout, self.usage.kinds)

    @cached_property
    def row_multiple(self) -> int:
        """Divisor of the rows of every budget."""
        ratios = [extent.every for extent in extents(self.outputs) if isinstance(extent, Rows | FrameRows)]
        return math.lcm(self.layout.row_multiple, *ratios)

    @cached_property
    def smallest(self) -> int:
        """Rows of the smallest item that graphs take."""
        return -(-self.min_rows // self.row_multiple) * self.row_multiple

    @cached_property
    def shortest(self) -> int:
        """Rows of the shortest item that has entries in each output of a padded batch, which may be hundreds."""
        counts = [extent.returned for extent in extents(self.declared) if isinstance(extent, BatchRows)]
        candidates = range(self.row_multiple, MOST_SHORT, self.row_multiple)
        return next((rows for rows in candidates if all(count(rows) for count in counts)), self.row_multiple)

    @cached_property
    def inputs_by_row(self) -> list[str]:
        """Names of tensors with an entry an item, of which the captured forward gets an entry a row."""
        return [one.name for one in self.inputs if isinstance(one, PerItem) and one.per_row]

    @property
    def computes_arguments(self) -> bool:
        """True if the captured forward gets what calls do not bring: buffers, or entries of items for each row."""
        return bool(self.buffers or self.inputs_by_row)

    @cached_property
    def counts_rows(self) -> bool:
        """True if a function of the rows of an item tells how many entries a padded batch has for it somewhere."""
        returned = [extent.returned for extent in extents(self.declared) if isinstance(extent, BatchRows)]
        return any(own is not AS_ROWS for own in returned) or any(getattr(b, "of_item", None) for b in self.buffers)

    @cached_property
    def largest(self) -> float:
        """Largest size of an item that all buffers have entries for; no item is larger than its rows."""
        return min((largest for _, largest in self.limited), default=math.inf)

    @cached_property
    def limited(self) -> list[tuple[Buffer, int]]:
        """Buffers with a largest size of items, and that size."""
        buffers = [buffer for buffer in self.buffers if isinstance(buffer, Buffer)]
        return [(buffer, buffer.largest) for buffer in buffers if buffer.largest is not None]

    def key(self, static_args: Mapping[str, Any], row_shape: Sequence[int]) -> StaticKey:
        """Return the key of the graphs for static arguments, and for rows of a shape if items of a batch have several.

        Raises:
            ChangeableError: An argument may change.
        """
        key = static_key(static_args) if static_args else ()
        return (*key, (self.row_input.name, (torch.Size, tuple(row_shape)))) if self.layout.one_row else key

    def sample(self, budget: Budget) -> Layout:
        """Return items of nearly equal size that fill a budget, see `sample_layout`."""
        return sample_layout(self.layout, budget, self.usage.windows, self.smallest)

    def exact_budget(self, layout: Layout) -> Budget:
        """Return the budget without padding that `layout` needs when it runs eager."""
        used = self.usage.of(layout)
        longest = max(1, used.longest, layout.length)
        return Budget._make((layout.size, used.items, max(1, used.segments), longest))  # without checks: calls ask
