"""Static inputs of graphs."""

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.values import check_not_freed
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import InputError
from varlen_graphs.graphs.padding_values import poison_floating, repeat_entries
from varlen_graphs.graphs.pinned_ring import PinnedRing
from varlen_graphs.graphs.row_source import NO_ROWS, RowPointer, RowSource, address_of_sizes
from varlen_graphs.graphs.static_inputs import StaticInputs
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import GatherIndices, Sizes, has_padding, pack_rows, real_indices
from varlen_graphs.layouts.samples import sample_item

HEADER = 5
"""Number of integers that come first; see `Arena.header`."""

FRONT = HEADER + len(NO_ROWS) + 2
"""Number of integers in front of the item table: even, because Triton compiles kernels anew for other addresses."""

PROBE_ROWS = 16
"""Rows of an item in a probe, which shows the form of a module's outputs."""


class Arena:
    """Rows, tensors beside them, item table and host buffers, shared by all budgets: each budget uses a prefix.

    Attributes:
        rows: `[largest rows, *shape]`. Past the active rows: leftovers of earlier calls. Graphs replace them by zeros,
            integers by the declared pad.
        items: int64: `header`, `source`, index of the first row of padding, 0, `table`, and the indices of the real
            rows in a batch to pack, one after the other.
        table: int64 `[largest items, 3 + columns]`, with one column more if items are grouped.
        source: The caller's rows, from which graphs copy them.
        header: int64 `[5]`; see `varlen_graphs.kernels.check.reference.check_items`.
        ring: Pinned memory that uploads go through.
        keeps_padding: If True, graphs leave floating padding as it is; for checks, until the end of a call.
        loading: True while functions of the declaration may run for a replay that is loaded, or not yet collected.
    """

    def __init__(
        self,
        spec: BufferSpec,
        budgets: Sequence[Budget],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        input_dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self._spec = spec
        self._extent = spec.row_extent
        self._longest = max(budget.max_seqlen for budget in budgets)
        most_rows, most_items = max(b.rows for b in budgets), max(b.items for b in budgets)
        self.loading = False
        self.keeps_padding = False
        self._rows_at: dict[Budget, Tensor] = {}
        self._dims, self._row_shape = len(self._extent.dims), torch.Size(row_shape)
        self._pad = 0 if dtype.is_floating_point else spec.row_input.pad
        self.rows = torch.full((most_rows, *row_shape), self._pad, dtype=dtype, device=device)
        padding = (0, 0, 0, *spec.layout.pads)
        self._width = len(padding)
        self._padding = array("q", padding * most_items)
        most_indices = most_rows if spec.packs else 0
        self.items = torch.tensor([0] * FRONT + [*padding] * most_items + [0] * most_indices, device=device)
        self._uploaded = self.items[: FRONT + len(self._padding)]
        self._gather_indices = self.items[FRONT + len(self._padding) :]
        self._front, self.table = self.items[:FRONT], self._uploaded[FRONT:].view(most_items, self._width)
        self.header = self._front[:HEADER]
        self.source = RowSource(self._front[HEADER : FRONT - 1], self._gather_indices, self.rows, self._extent)
        self.ring = PinnedRing(len(self.items), device)
        self._host = {
            buffer.name: torch.zeros(
                max(math.prod(buffer.capacity(budget)) for budget in budgets), dtype=buffer.dtype, device=device
            )
            for buffer in self._spec.host_buffers
        }
        self._inputs = StaticInputs(spec, budgets, input_dtypes, device)

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of the arena."""
        return [self.rows, self.items, *self._host.values(), *self._inputs.memory]

    def holds(self, budget: Budget) -> bool:
        """Return True if there is room for a budget."""
        rooms = [(buffer.capacity(budget), self._host[buffer.name]) for buffer in self._spec.host_buffers]
        enough = all(math.prod(capacity) <= len(room) for capacity, room in rooms)
        return enough and budget.rows <= len(self.rows) and budget.items <= len(self.table)

    def raise_loading(self) -> NoReturn:
        """Raise that a function of the declaration made a call, or a capture, while it ran for another call."""
        raise InputError(
            "a function of the declaration, of a HostBuffer or of Entries, called the encoder that it is computed for, "
            "which would overwrite the rows or the outputs of the call it belongs to; compute it from the layout "
            "alone, or call another encoder"
        )

    def check_row_shape(self, shape: Sequence[int]) -> None:
        """Check that rows of this shape, `[rows, ...]` or `[batch, length, ...]`, can be copied in.

        Raises:
            InputError: A row has another shape than was captured.
        """
        if shape[self._dims :] != self._row_shape:
            packed = self._spec.row_input
            came = packed.argument_shape(shape[: self._dims], shape[self._dims :])
            expected = packed.describe(self._extent.dims, self._row_shape)
            raise InputError(f"{packed.name} is {came}: expected {expected}, as captured")

    def takes(self, rows: Tensor) -> bool:
        """Return True if these are dense packed rows of the shape, the dtype and the device of those here."""
        static = self.rows
        return (
            rows.layout is torch.strided
            and not rows.is_nested
            and rows.dtype is static.dtype
            and rows.dim() > 0
            and rows.shape[1:] == self._row_shape
            and rows.device == static.device
        )

    def poison(self) -> None:
        """Overwrite floating tensors with NaN and rare numbers, which the next call finds as padding."""
        poison_floating([self.rows, *self._inputs.memory])
        self.keeps_padding = True

    def fill(self, call: Call) -> None:
        """Overwrite floating tensors with the entries of a call, which the next call finds as padding. No sync."""
        for static, tensor in [(self.rows, call.rows), *self._inputs.beside(call)]:
            repeat_entries(static, tensor)
        self.keeps_padding = True

    def view(self, budget: Budget) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        """Return the rows, the item table, and the host buffers and inputs that the graph of a budget reads."""
        given = {}
        for buffer in self._spec.host_buffers:
            capacity = buffer.capacity(budget)
            given[buffer.name] = self._host[buffer.name][: math.prod(capacity)].view(capacity)
        given |= self._inputs.view(budget)
        return self._at(budget), self._spec.item_table(self.table[: budget.items], budget), given

    def call(self, layout: Layout, budget: Budget, static_args: dict[str, Any]) -> Call:
        """Return a call of the first rows at a budget, where these and the tensors beside them lie."""
        item_slice = ItemSlice.of(layout)
        rows, inputs = self._extent.part(self._at(budget), item_slice), self._inputs.part(item_slice, budget)
        return Call(
            rows, {}, static_args, self._spec.key(static_args, self._row_shape), {}, None, layout, inputs=inputs
        )

    def forget(self, budget: Budget) -> None:
        """Keep nothing of a budget whose graph was dropped."""
        self._rows_at.pop(budget, None)

    def _at(self, budget: Budget) -> Tensor:
        """Return the rows of a budget, as the module takes them."""
        if budget not in self._rows_at:
            shape = (*self._extent.shape(budget), *self.rows.shape[1:])
            self._rows_at[budget] = self.rows[: budget.rows].view(shape)
        return self._rows_at[budget]

    def load_inputs(
        self,
        call: Call,
        slices: Sequence[tuple[ItemSlice, ItemSlice]],
        budget: Budget,
        gather_indices: GatherIndices | None = None,
    ) -> None:
        """Copy the tensors beside the rows of one replay; see `StaticInputs.load`."""
        self._inputs.load(call, slices, budget, gather_indices, clears=not self.keeps_padding)

    def load_rows(
        self,
        call: Call,
        slices: Sequence[tuple[ItemSlice, ItemSlice]],
        budget: Budget,
        gather_indices: GatherIndices | None = None,
    ) -> None:
        """Copy the rows of one replay, one copy a slice. Queued on the current stream.

        Floating rows are cast to the dtype of the arena. Tensors on the host sync if they lie in pinned memory.

        Args:
            call: The call.
            slices: Those of its rows and items, and those in the replay.
            budget: Budget of the replay.
            gather_indices: For a batch that is packed on the way: indices of its real rows.
        """
        if call.staged:
            return
        if gather_indices is not None:
            pack_rows(call.rows, call.sizes, gather_indices, self.rows[: call.shape[0]])
            return
        rows, target, place = call.rows, self._at(budget), self._extent.place
        for there, here in slices:
            whole = there.rows == len(rows) and not self._extent.gaps
            target[place(here)].copy_(rows if whole else rows[place(there)], non_blocking=True)

    def load_layout(
        self,
        layout: Layout,
        budget: Budget,
        pointer: RowPointer | None = None,
        sizes: Sizes = (),
        padded: Sequence[int] = (),
    ) -> None:
        """Copy the items of one replay, and the host buffers computed from them. Queued on the current stream; no sync.

        Args:
            layout: The items.
            budget: Budget of the replay.
            pointer: Where the rows lie that the graph copies; `None` if it copies none.
            sizes: For a batch that is packed on the way: sizes of its items; see `gather_indices`.
            padded: The size to which these are padded.
        """
        self._load_items(layout, pointer, sizes, padded)
        before, self.loading = self.loading, True
        try:
            for buffer in self._spec.host_buffers:
                value = buffer.compute(layout, budget, self._spec.layout.merge).flatten()
                static = self._host[buffer.name][: len(value)]
                pinned = value.pin_memory() if static.is_cuda else value  # torch reuses it only after the copy
                static.copy_(pinned, non_blocking=True)
        finally:
            self.loading = before

    def gather_indices(self, call: Call) -> GatherIndices:
        """Return the indices of the real rows of a call to pack, as loaded with its items, until the next replay."""
        gather_indices = GatherIndices(self.rows.device)
        gather_indices.keep(call.sizes, call.padded, self._gather_indices[: call.shape[0]])
        return gather_indices

    def load_table(
        self, description: Mapping[str, Any], call: int, items: int, active: int, pointer: RowPointer | None = None
    ) -> None:
        """Load the items of one replay from tensors on the device, for the graph to check. No sync.

        A graph reads sizes `(t, h, w)` in int64 where they lie; others are copied.

        Args:
            description: The layout argument and the columns, by name.
            call: Number of this call among those of its kind.
            items: Number of items.
            active: Number of their rows.
            pointer: As for `load_layout`.

        Raises:
            InputError: The memory of one of them was freed.
        """
        layout = self._spec.layout
        for name, value in description.items():
            check_not_freed(value, name)
        address = address_of_sizes(sizes := description[layout.name])
        if not address:
            layout.write(sizes, self.table[:items])
        for at, column in enumerate(layout.columns, start=3):
            self.table[:items, at].copy_(description[column.name])
        padding = len(self.rows) if self.keeps_padding else active
        self.ring.upload(array("q", (call, items, active, 1, address, *(pointer or NO_ROWS), padding, 0)), self._front)

    def probes(self) -> list[tuple[Tensor, ItemTable, dict[str, Tensor]]]:
        """Return one item of some 32 rows, and a few of half as many, without padding; host buffers hold their pads.

        Two proportions of rows and items, with few rows each, because a module may have a limit of its own; but as many
        as an item needs to have entries in all outputs.
        """
        several, few = min(3, len(self.table)), self._few
        if self._spec.layout.one_row:
            return [self._probe(several + 1, 1), self._probe(several, 1)]
        return [self._probe(1, 2 * few), self._probe(several, few)]

    def odd_probe(self) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        """Return other rows than those of `probes`: an odd number, where items may have that, of one or three items."""
        items = 3 if len(self.table) >= 3 else 1
        return self._probe(items, 1 if self._spec.layout.one_row else self._few + self._spec.row_multiple)

    def smallest_probe(self) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        """Return one item of as few rows as an item may have."""
        return self._probe(1, self._least)

    @property
    def _few(self) -> int:
        return max(-(-PROBE_ROWS // self._spec.row_multiple) * self._spec.row_multiple, self._least)

    @property
    def _least(self) -> int:
        return max(self._spec.row_multiple, self._spec.shortest, self._spec.smallest)

    def _probe(self, items: int, wanted: int) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        spec, unit = self._spec, self._spec.row_multiple
        rows = max(unit, min(wanted, self._longest // unit * unit))
        item = sample_item(spec.layout, rows, spec.layout.merge)
        layout = spec.layout.layout([item] * items)
        budget = spec.exact_budget(layout)
        host = {
            b.name: torch.full(b.capacity(budget), b.pad, dtype=b.dtype, device=self.table.device)
            for b in spec.host_buffers
        }
        values = torch.tensor(layout.items, device=self.table.device)
        shape = (*self._extent.shape(budget), *self.rows.shape[1:])
        probe_rows = torch.full(shape, self._pad, dtype=self.rows.dtype, device=self.rows.device)
        host |= self._inputs.pads(budget)
        return probe_rows, spec.item_table(values, budget), host

    def load_sample(self, budget: Budget) -> None:
        """Load items that fill a budget, for warm-up and capture; integer rows and host buffers hold their pads."""
        if not self.rows.is_floating_point():  # an earlier call may have left ids that no embedding has
            self.rows.fill_(self._spec.row_input.pad)
        self._inputs.fill_pads()
        self._load_items(self._spec.sample(budget))
        for buffer in self._spec.host_buffers:
            self._host[buffer.name].fill_(buffer.pad)

    def _load_items(
        self, layout: Layout, pointer: RowPointer | None = None, sizes: Sizes = (), padded: Sequence[int] = ()
    ) -> None:
        active = layout.total
        padding = len(self.rows) if self.keeps_padding else active
        values = array("q", (0, len(layout.items), active, 0, 0, *(pointer or NO_ROWS), padding, 0))
        values.extend(chain.from_iterable(layout.items))
        values += self._padding[len(values) - FRONT :]  # of the whole table: no budget needs a slice of its own
        if padded and has_padding(active, len(layout), padded):
            values.frombytes(real_indices(sizes, padded).tobytes())
            self.ring.upload(values, self.items[: len(values)])
        else:
            self.ring.upload(values, self._uploaded)
