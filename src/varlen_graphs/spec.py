"""The declaration of a module: which argument holds the rows, which describes the items, what follows from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.buffers import AttentionSchedule, Buffer, CuSeqlens, HostBuffer, MaxSeqlen
from varlen_graphs.errors import BudgetError, LayoutError, SpecError
from varlen_graphs.layout import Layout, LayoutArgument, Per, is_integers, parse_column, segments_of
from varlen_graphs.outputs import Declared, Extent, Rows, extents
from varlen_graphs.packing import Demand, Load, Span

ROWS = Rows()


@dataclass(frozen=True)
class PackedRows:
    """The argument that holds the packed rows, `[rows, *shape]`.

    Attributes:
        name: The argument.
        shape: The shape of one row; `None` takes it from the first call.
        dtype: The dtype the module sees. `None`: that of its first floating parameter (or the default dtype); floating
            rows of another dtype are cast. An integer dtype must be declared, and rows must come in it.
        pad: What padding rows of an integer dtype hold; it must be valid for the module (a token id, say). Floating
            padding may hold anything.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    pad: int = 0


@dataclass(frozen=True)
class BufferSpec:
    """What a module's arguments and outputs are, so that graphs can be captured for it.

    Attributes:
        rows: The argument with the packed rows: a name, or a `PackedRows`.
        layout: The argument that describes the items: `GridTHW` or `Lengths`. The module need not take it itself.
        buffers: Arguments that are computed from the items, inside the graph.
        outputs: What comes out: `Rows()` for tensors with an entry a row, `Rows(every=4)`, `Items(rows=64)`, and
            `Outputs(...)` or a tuple of these for outputs with parts.

    Raises:
        SpecError: One name declared twice, or a segment kind the layout does not have.
    """

    rows: str | PackedRows
    layout: LayoutArgument
    buffers: Sequence[Buffer | HostBuffer] = ()
    outputs: Declared = field(default_factory=Rows)

    def __post_init__(self) -> None:
        names = [self.packed.name, self.layout.name]
        names += [column.name for column in self.layout.columns]
        names += [buffer.name for buffer in self.buffers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{twice} declared more than once: expected one declaration for each argument, got {names}")
        for buffer in self._segmented:
            if buffer.per not in ("frame", "item", "clip"):
                raise SpecError(f"{buffer!r}: expected per='frame', 'item' or 'clip'")
            if buffer.per != "item" and not self.layout.has_frames:
                raise SpecError(
                    f"{buffer!r} needs items with frames, which {type(self.layout).__name__} has not; use per='item'"
                )

    @cached_property
    def packed(self) -> PackedRows:
        """The rows, as a `PackedRows`."""
        return PackedRows(self.rows) if isinstance(self.rows, str) else self.rows

    @property
    def row_extent(self) -> Extent:
        """What the rows of a call have entries for."""
        return ROWS

    def rows_shape(self, layout: Layout, example: Tensor) -> tuple[int, ...]:
        """The shape of the rows of a call with these items, and with entries as in `example`."""
        return (*self.row_extent.size(Span.of(layout)), *self.row_extent.rest(example))

    @cached_property
    def host_buffers(self) -> list[HostBuffer]:
        """The buffers that the host computes for each replay."""
        return [buffer for buffer in self.buffers if isinstance(buffer, HostBuffer)]

    @property
    def _segmented(self) -> list[AttentionSchedule | CuSeqlens | MaxSeqlen]:
        return [buffer for buffer in self.buffers if isinstance(buffer, AttentionSchedule | CuSeqlens | MaxSeqlen)]

    @cached_property
    def _kinds(self) -> set[Per]:
        """The kinds of segments that some buffer uses, or may use."""
        kinds = {buffer.per for buffer in self._segmented}
        if any(buffer.any_segments for buffer in self.buffers):
            kinds |= {"item", "frame"} if self.layout.has_frames else {"item"}
        return kinds

    @cached_property
    def row_multiple(self) -> int:
        """What the rows of every budget must be divisible by."""
        ratios = [extent.every for extent in extents(self.outputs) if isinstance(extent, Rows)]
        return math.lcm(self.layout.row_multiple, *ratios)

    def demand(self, item: Sequence[int]) -> Demand:
        """What an item needs of a budget, by the segments that are declared."""
        kinds = [segments_of(item, per) for per in self._kinds]
        return Demand(
            rows=item[0] * item[1] * item[2],
            segments=max((count for count, _ in kinds), default=0),
            longest=max((length for _, length in kinds), default=0),
        )

    def load(self, layout: Layout) -> Load:
        """What all items together need of a budget: the sum of their demands."""
        frames, whole = self.segment_kinds
        segments = longest = 0
        if whole:
            segments, longest = len(layout), max(layout.rows)
        if frames:  # an item has no fewer segments than one, and no frame is longer than its item
            segments = sum([item[0] for item in layout.items])
            longest = longest or max([item[1] * item[2] for item in layout.items])
        return Load(layout.total, len(layout), segments, longest)

    def squares(self, layout: Layout) -> int:
        """The sum of squared segment lengths, which attention costs follow; of the longer kind where there are two."""
        frames, whole = self.segment_kinds
        if whole:
            return sum([rows * rows for rows in layout.rows])
        return sum([item[0] * (item[1] * item[2]) ** 2 for item in layout.items]) if frames else 0

    @cached_property
    def segment_kinds(self) -> tuple[bool, bool]:
        """Whether frames are segments, and whether items are."""
        return "frame" in self._kinds, bool(self._kinds - {"frame"})

    def most(self, rows: int, items: int, min_segment_rows: int) -> Load:
        """The most that so many items of together so many rows can need of a budget, whatever they are.

        Args:
            rows: Rows of all items.
            items: Items.
            min_segment_rows: What no segment is shorter than.
        """
        frames, whole = self.segment_kinds
        segments = rows // max(min_segment_rows, self.layout.row_multiple) if frames else items
        longest = rows - (items - 1) * self.layout.row_multiple
        return Load(rows, items, segments if frames or whole else 0, longest if frames or whole else 0)

    def is_on(self, description: Mapping[str, Any], device: torch.device) -> bool:
        """Whether all that describes the items is tensors on `device`, as the item table takes them."""
        layout = description[self.layout.name]
        if not self.layout.is_table(layout) or layout.device != device:
            return False
        columns = [description[column.name] for column in self.layout.columns]
        return all(is_integers(c, 1) and len(c) == len(layout) and c.device == device for c in columns)

    def exact_budget(self, layout: Layout) -> Budget:
        """The budget without padding that `layout` needs when it runs eager."""
        load = self.load(layout)
        return Budget(load.rows, load.items, max(1, load.segments), max(1, load.longest))

    def read_layout(self, description: Mapping[str, Any], shape: Sequence[int]) -> Layout:
        """The items of a call, checked against the shape of its rows. Costs a sync if they are described on a GPU.

        Args:
            description: The layout argument and the columns, by name.
            shape: The shape of the rows; empty where there are none yet.

        Raises:
            LayoutError: Items that make no sense or have other rows than came, or an item that an output ratio cuts.
        """
        items: list[tuple[int, ...]] = list(self.layout.parse(description[self.layout.name]))
        for column in self.layout.columns:
            values = parse_column(column, description[column.name], len(items))
            items = [(*item, value) for item, value in zip(items, values, strict=True)]
        layout = Layout(tuple(items))
        if shape:
            self.layout.check_rows(layout, shape, self.packed.name)
        self._check_ratios(layout)
        return layout

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
            BudgetError: `max_seqlen` is below the shortest segment an item can have.
        """
        whole = self._kinds != {"frame"}
        shortest = self.row_multiple if whole else self.layout.row_multiple
        for budget in budgets:
            if self._kinds and budget.max_seqlen < shortest:
                raise BudgetError(
                    f"no item could use {budget}: the shortest segment has {shortest} rows (merge size "
                    f"{self.layout.merge}, and the ratios of the outputs); raise max_seqlen"
                )
