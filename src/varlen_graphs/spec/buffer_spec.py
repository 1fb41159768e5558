"""The declaration of a module: which argument holds the rows, which describes the items, what follows from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.buffers import AttentionSchedule, Buffer, CuSeqlens, HostBuffer, MaxSeqlen
from varlen_graphs.errors import BudgetError, LayoutError, SpecError
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.needs import Needs
from varlen_graphs.layout.padded import Padded, PaddedMask, check_batch, check_marks
from varlen_graphs.layout.segments import Per, Windows
from varlen_graphs.layout.span import Span
from varlen_graphs.layout.values import check_numbers, is_integers
from varlen_graphs.spec.entries import BatchRows, CountedEntries, Extent, FrameRows, Groups, Rows
from varlen_graphs.spec.outputs import Declared, extents, with_rows
from varlen_graphs.spec.rows import PackedRows

ROWS, BATCH_ROWS = Rows(), BatchRows()


@dataclass(frozen=True)
class BufferSpec:
    """What a module's arguments and outputs are, so that graphs can be captured for it.

    Attributes:
        rows: The argument with the packed rows: a name, or a `PackedRows`.
        layout: The argument that describes the items: `GridTHW`, `GridHW` or `Lengths` of packed rows, `PaddedMask` or
            `PaddedLengths` of a padded batch. The module need not take it itself.
        buffers: Arguments that are computed from the items, inside the graph.
        outputs: What comes out: `Rows()` for tensors with an entry a row, `Rows(every=4)`, `Items(rows=64)`, and
            `Outputs(...)`, a dict or a tuple of these for outputs with parts.

    Raises:
        SpecError: Something else where a declaration or a name is expected, one name declared twice, a segment kind the
            layout does not have, or a buffer or output ratio that is not for rows of its kind.
    """

    rows: str | PackedRows
    layout: LayoutArgument
    buffers: Sequence[Buffer | HostBuffer] = ()
    outputs: Declared = field(default_factory=Rows)

    def __post_init__(self) -> None:
        if not isinstance(self.rows, str | PackedRows):
            raise SpecError(f"rows={self.rows!r}: expected the name of one argument, or a PackedRows")
        if not isinstance(self.layout, LayoutArgument):
            raise SpecError(
                f"layout={self.layout!r}: expected a declaration of what describes the items, such as "
                "Lengths('lengths') or GridTHW('grid_thw')"
            )
        if not isinstance(self.buffers, Sequence) or not all(isinstance(b, Buffer | HostBuffer) for b in self.buffers):
            raise SpecError(
                f"buffers={self.buffers!r}: expected a list of declarations, such as [CuSeqlens('cu_seqlens')]"
            )
        names = [self.packed.name, *self.describing]
        names += [column.name for column in self.layout.columns if column.function is not None]
        names += [buffer.name for buffer in self.buffers]
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise SpecError(f"{wrong} declared as arguments: expected their names, as strings")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{twice} declared more than once: expected one declaration for each argument, got {names}")
        nested = [column.name for column in self.layout.columns if column.groups]
        if len(nested) > 1:
            raise SpecError(f"columns {nested} would all tell the groups: expected one NestedColumn")
        if self.layout.padded and self.packed.padded_by:
            raise SpecError(
                f"{self.rows!r} is to be packed, but {type(self.layout).__name__} has padded rows: leave padded_by out,"
                " or declare a layout of packed rows, such as Lengths"
            )
        kind = "padded" if self.layout.padded else "packed"
        for buffer in self.buffers:
            if buffer.for_rows not in (kind, None):
                raise SpecError(
                    f"{buffer!r} is for {buffer.for_rows} rows, but {type(self.layout).__name__} has {kind} ones; "
                    "declare KeyPaddingMask, MaxSeqlen, DeviceBuffer or HostBuffer for a padded batch, the others for "
                    "packed rows"
                )
        if self.batched and self.packed.rows_dim:
            raise SpecError(f"{self.rows!r}: a padded batch is [batch, length, ...]; leave rows_dim out")
        if self.batched and any(isinstance(e, Rows) and e != ROWS for e in extents(self.outputs)):
            raise SpecError(
                f"{self.outputs!r}: a padded batch has one entry a row, Rows(); or declare Items(...) or Entries(...)"
            )
        for buffer in self._segmented:
            if buffer.per not in ("frame", "item", "clip", "group") and not isinstance(buffer.per, Windows):
                raise SpecError(f"{buffer!r}: expected per='frame', 'item', 'clip', 'group' or Windows(side)")
            if buffer.per == "group":
                self._check_grouped(buffer, "per='item'")
            elif buffer.per != "item" and not self.layout.has_frames:
                raise SpecError(
                    f"{buffer!r} needs items with frames, which {type(self.layout).__name__} has not; use per='item'"
                )
        orders = [getattr(buffer, name, None) for buffer in self.buffers for name in ("windows", "order")]
        sizes = {per for per in (*self.needs.kinds, *orders) if isinstance(per, Windows)}
        if len(sizes) > 1:
            raise SpecError(f"there are {sorted(sizes, key=lambda per: per.side)}: expected windows of one size")

        for extent in extents(self.outputs):
            if isinstance(extent, Groups):
                self._check_grouped(extent, "Items(...)")

    def _check_grouped(self, declaration: object, instead: str) -> None:
        if not self.layout.grouped:
            raise SpecError(
                f"{declaration!r} needs groups of items, which {self.layout.name!r} does not describe: declare a "
                f"NestedColumn that tells them, or use {instead}"
            )

    @cached_property
    def packed(self) -> PackedRows:
        """The rows, as a `PackedRows`."""
        return PackedRows(self.rows) if isinstance(self.rows, str) else self.rows

    @cached_property
    def describing(self) -> list[str]:
        """The arguments that describe the items of a call: the layout, the columns, and the mask of a batch to pack."""
        columns = [column.name for column in self.layout.columns if column.function is None]
        mask = [self.packed.padded_by] if self.packed.padded_by else []
        return [self.layout.name, *columns, *mask]

    @property
    def batched(self) -> bool:
        """Whether a call brings a padded batch, whatever becomes of it."""
        return self.layout.padded or self.packed.padded_by is not None

    @property
    def call_dims(self) -> tuple[str, ...]:
        """What the rows of a call lie in, for messages."""
        return BATCH_ROWS.dims if self.batched else ROWS.dims

    @property
    def call_rows_are(self) -> str:
        """How they lie there, for messages."""
        return Padded.rows_are if self.batched else self.layout.rows_are

    @property
    def row_extent(self) -> Extent:
        """What the rows that the module gets, and outputs declared as `Rows()`, have entries for."""
        return BATCH_ROWS if self.layout.padded else ROWS

    @cached_property
    def declared(self) -> Declared:
        """The outputs; of a padded batch with what `Rows()` means there."""
        return with_rows(self.outputs, BATCH_ROWS) if self.layout.padded else self.outputs

    def argument_shape(self, layout: Layout, example: Tensor) -> list[int]:
        """The shape of the argument with the rows of these items, which have entries as in `example`."""
        return self.packed.argument_shape(self.row_extent.size(Span.of(layout)), self.row_extent.rest(example))

    @cached_property
    def host_buffers(self) -> list[HostBuffer]:
        """The buffers that the host computes for each replay."""
        return [buffer for buffer in self.buffers if isinstance(buffer, HostBuffer)]

    @cached_property
    def counts_entries(self) -> bool:
        """Whether it takes a look at every item to know how many entries some output has."""
        return any(isinstance(extent, CountedEntries | Groups) for extent in extents(self.outputs))

    @cached_property
    def needs_layout(self) -> bool:
        """Whether the host has to see the items, even where they are described on the GPU."""
        columns = any(column.function is not None for column in self.layout.columns)
        brought = bool(self.host_buffers or self.packed.padded_by or self.layout.grouped)
        return brought or columns or self.counts_entries

    @property
    def _segmented(self) -> list[AttentionSchedule | CuSeqlens | MaxSeqlen]:
        return [buffer for buffer in self.buffers if isinstance(buffer, AttentionSchedule | CuSeqlens | MaxSeqlen)]

    @cached_property
    def needs(self) -> Needs:
        """What items need of a budget, by the kinds of segments that some buffer uses, or may use."""
        kinds: set[Per] = {buffer.per for buffer in self._segmented}
        if self.layout.padded:
            kinds.add("item")  # each takes a place of the batch, and none is longer
        if any(buffer.any_segments for buffer in self.buffers):
            kinds |= {"item", "frame"} if self.layout.has_frames else {"item"}
            kinds |= {"group"} if self.layout.grouped else set()
        return Needs(self.layout, kinds)

    @cached_property
    def row_multiple(self) -> int:
        """What the rows of every budget must be divisible by."""
        ratios = [extent.every for extent in extents(self.outputs) if isinstance(extent, Rows | FrameRows)]
        return math.lcm(self.layout.row_multiple, *ratios)

    def is_on(self, description: Mapping[str, Any], device: torch.device) -> bool:
        """Whether all that describes the items is tensors on `device`, as the item table takes them."""
        layout = description[self.layout.name]
        if not self.layout.is_table(layout) or layout.device != device:
            return False
        columns = [description[column.name] for column in self.layout.columns]
        return all(is_integers(c, 1) and len(c) == len(layout) and c.device == device for c in columns)

    def exact_budget(self, layout: Layout) -> Budget:
        """The budget without padding that `layout` needs when it runs eager."""
        load = self.needs.load(layout)
        return Budget(layout.size, load.items, max(1, load.segments), max(1, load.longest, layout.length))

    def check_description(self, description: Mapping[str, Any], rows: int) -> None:
        """Whether the layout argument and the columns are no longer than so many rows can need.

        Raises:
            LayoutError: One is.
        """
        for name, value in description.items():
            check_numbers(name, value, rows)

    def read_layout(self, description: Mapping[str, Any], shape: Sequence[int]) -> Layout:
        """The items of a call, checked against the shape of its rows. Costs a sync if they are described on a GPU.

        Args:
            description: The layout argument and the columns, by name.
            shape: The shape of the rows, `[rows, ...]`; empty where there are none yet.

        Raises:
            LayoutError: Items that make no sense or have other rows than came, or an item that an output ratio cuts.
        """
        if shape:
            self.check_description(description, math.prod(shape[:2]))
        value = description[self.layout.name]
        sizes = self.layout.parse(value)
        call = Layout(tuple(sizes), self.layout.batch_length(value, sizes, shape))
        if shape:  # before any function of the user's sees the items
            self._check_rows(call, description, shape)
        items: list[tuple[int, ...]] = list(sizes)
        for column in self.layout.columns:
            brought = description[column.name] if column.function is None else column.function(call)
            values = column.parse(brought, len(items))
            items = [(*item, value) for item, value in zip(items, values, strict=True)]
            if column.groups:
                begins = column.begins(brought, len(items))
        if self.layout.grouped:
            items = [(*item, begin) for item, begin in zip(items, begins, strict=True)]
        layout = Layout(tuple(items), call.length, self.layout.grouped)
        self._check_ratios(layout)
        self._check_sizes(layout)
        return layout

    def _check_rows(self, layout: Layout, description: Mapping[str, Any], shape: Sequence[int]) -> None:
        name, mask = self.layout.name, self.packed.padded_by
        if mask is None:
            self.layout.check_rows(layout, shape, self.packed.name)
        else:
            check_batch(name, layout, shape, self.packed.name)
            check_marks(PaddedMask(mask), description[mask], name, layout, shape)

    @cached_property
    def largest(self) -> float:
        """The largest size of an item that all buffers have entries for; no item is larger than its rows."""
        return min((largest for _, largest in self._limited), default=math.inf)

    @cached_property
    def _limited(self) -> list[tuple[Buffer, int]]:
        buffers = [buffer for buffer in self.buffers if isinstance(buffer, Buffer)]
        return [(buffer, buffer.largest) for buffer in buffers if buffer.largest is not None]

    def _check_sizes(self, layout: Layout) -> None:
        for buffer, largest in self._limited:
            for index, item in enumerate(layout.items):
                if buffer.size(item) > largest:
                    raise LayoutError(
                        f"{self.layout.name}[{index}] has a size of {buffer.size(item)}, but buffer {buffer.name!r} "
                        f"has entries up to {largest}: resize the input, or declare the buffer with a larger largest="
                    )

    def _check_ratios(self, layout: Layout) -> None:
        multiple = self.row_multiple
        if multiple == self.layout.row_multiple:  # which the layout has checked
            return
        for index, count in enumerate(layout.rows):
            if count % multiple:
                raise LayoutError(
                    f"{self.layout.name}[{index}] has {count} rows: expected a multiple of {multiple}, because the "
                    "outputs are declared with that ratio; pad the item"
                )

    def check_budgets(self, budgets: Sequence[Budget]) -> None:
        """Whether some item could use each budget.

        Raises:
            BudgetError: `max_seqlen` is below the shortest segment an item can have; or batches are padded, and a
                budget is not that of one.
        """
        if self.layout.padded:
            for budget in budgets:
                if budget.rows != budget.items * budget.max_seqlen:
                    raise BudgetError(
                        f"{budget} is not that of a padded batch: expected rows = items * max_seqlen; write "
                        "Budget.padded(batch, length), or a PaddedLadder"
                    )
        _, whole, _ = self.needs.by_kind
        shortest = self.row_multiple if whole else self.layout.row_multiple
        for budget in budgets:
            if self.needs.kinds and budget.max_seqlen < shortest:
                raise BudgetError(
                    f"no item could use {budget}: the shortest segment has {shortest} rows (merge size "
                    f"{self.layout.merge}, and the ratios of the outputs); raise max_seqlen"
                )
