"""The static memory of an encoder: what graphs read, and where their outputs lie."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.capture.memory import poison
from varlen_graphs.errors import InputError
from varlen_graphs.layout import Layout, sample_layout
from varlen_graphs.packing import Pack
from varlen_graphs.spec import BufferSpec
from varlen_graphs.table import ItemTable


class Arena:
    """Rows, item table and host buffers, shared by all budgets: what a budget uses is a prefix of each.

    Attributes:
        rows: `[largest rows, *shape]`. Past the active rows: whatever was there before (integers: the declared pad).
        table: int64 `[largest items, 3 + columns]`.
    """

    def __init__(
        self,
        spec: BufferSpec,
        budgets: Sequence[Budget],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._longest = max(budget.max_seqlen for budget in budgets)
        most_rows, most_items = max(b.rows for b in budgets), max(b.items for b in budgets)
        self.rows = torch.full((most_rows, *row_shape), self._pad(dtype), dtype=dtype, device=device)
        self._padding = torch.tensor([(0, 0, 0, *(column.pad for column in spec.layout.columns))] * most_items)
        self.table = self._padding.to(device, copy=True)
        self._host = {
            buffer.name: torch.zeros(
                max(math.prod(buffer.capacity(budget)) for budget in budgets), dtype=buffer.dtype, device=device
            )
            for buffer in self._spec.host_buffers
        }

    def check(self, rows: Tensor) -> None:
        """Whether rows could be copied in.

        Raises:
            InputError: Another row shape than was captured.
        """
        name, static = self._spec.packed.name, self.rows
        if rows.shape[1:] != static.shape[1:]:
            raise InputError(
                f"{name} is {list(rows.shape)}: expected [rows, {', '.join(map(str, static.shape[1:]))}], as captured"
            )

    def poison(self) -> None:
        """Overwrite floating rows with NaN."""
        if self.rows.is_floating_point():
            poison(self.rows)

    def _pad(self, dtype: torch.dtype) -> int:
        return 0 if dtype.is_floating_point else self._spec.packed.pad

    def view(self, budget: Budget) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        """The rows, the item table and the host buffers that the graph of a budget reads."""
        host = {}
        for buffer in self._spec.host_buffers:
            capacity = buffer.capacity(budget)
            host[buffer.name] = self._host[buffer.name][: math.prod(capacity)].view(capacity)
        return self.rows[: budget.rows], ItemTable(self.table[: budget.items], budget, self._spec.layout), host

    def load(self, rows: Tensor, layout: Layout, pack: Pack, budget: Budget) -> None:
        """Copy the rows and items of one replay in. Queued on the current stream; no sync.

        Floating rows are cast to the dtype of the arena.
        """
        active = 0
        for there, here in pack.spans(layout):
            active = here.row + here.rows
            self.rows[here.row : active].copy_(rows[there.row : there.row + there.rows], non_blocking=True)
        if not self.rows.is_floating_point():
            self.rows[active : budget.rows].fill_(self._spec.packed.pad)
        packed = pack.layout(layout)
        self._load_items(packed, budget)
        for buffer in self._spec.host_buffers:
            static = self._host[buffer.name][: math.prod(buffer.capacity(budget))]
            self._upload(buffer.compute(packed, budget).flatten(), static)

    def probes(self) -> list[tuple[Tensor, ItemTable, dict[str, Tensor]]]:
        """One item without padding, of some 64 rows and of twice as many; host buffers hold their pads."""
        spec, probes = self._spec, []
        unit = spec.row_multiple
        for wanted in (64, 128):
            rows = max(unit, min(-(-wanted // unit) * unit, self._longest // unit * unit))
            pads = [column.pad for column in spec.layout.columns]
            layout = Layout(((1, spec.layout.merge, rows // spec.layout.merge, *pads),))
            budget = spec.exact_budget(layout)
            host = {
                b.name: torch.full(b.capacity(budget), b.pad, dtype=b.dtype, device=self.table.device)
                for b in spec.host_buffers
            }
            values = torch.tensor(layout.items, device=self.table.device)
            probe_rows = torch.full_like(self.rows[:1], self._pad(self.rows.dtype)).repeat_interleave(rows, 0)
            probes.append((probe_rows, ItemTable(values, budget, spec.layout), host))
        return probes

    def load_sample(self, budget: Budget) -> None:
        """Items that fill a budget, to warm up and capture with; host buffers hold their pads."""
        self._load_items(sample_layout(self._spec.layout, budget), budget)
        for buffer in self._spec.host_buffers:
            self._host[buffer.name].fill_(buffer.pad)

    def _load_items(self, layout: Layout, budget: Budget) -> None:
        items = self._padding[: budget.items].clone()
        items[: len(layout)] = torch.tensor(layout.items)
        self._upload(items, self.table[: budget.items])

    @staticmethod
    def _upload(value: Tensor, static: Tensor) -> None:
        """Copy from the host without waiting: torch's allocator reuses a pinned block only after the copy from it."""
        if static.is_cuda:
            value = value.pin_memory()
        static.copy_(value, non_blocking=True)
