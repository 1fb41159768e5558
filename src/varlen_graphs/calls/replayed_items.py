"""The items of a call as its replays take them: known to the host, or to the GPU only."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.stream_order import current_stream
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.gpu_checks import GpuChecks
from varlen_graphs.graphs.row_source import RowPointer
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import Sizes
from varlen_graphs.routing.packing import ReplayBatch


class HostItems:
    """Items that the host knows.

    Args:
        layout: The items.
        sizes: For a batch that its replay packs: sizes of its items.
        padded: The size to which these are padded.

    Attributes:
        everything: The slice of all items.
        nan_masks: See `Collected.take`.
    """

    nan_masks: Mapping[torch.dtype, Tensor] | None = None

    def __init__(self, layout: Layout, sizes: Sizes = (), padded: Sequence[int] = ()) -> None:
        self.layout = layout
        self._batch = sizes, padded
        self.everything = ItemSlice.of(layout)
        self._all = [(self.everything, self.everything)]

    def slices(self, batch: ReplayBatch) -> Sequence[tuple[ItemSlice, ItemSlice]]:
        """Return the slices of the rows and items of a replay batch in the call and in its replay."""
        if len(batch.items) == len(self.layout.items) and not self.layout.length:
            return self._all
        return batch.slices(self.layout, self.everything)

    def load(self, arena: Arena, batch: ReplayBatch, pointer: RowPointer | None = None) -> int:
        """Copy the items of a replay batch into the arena; return their rows. Queued on the current stream; no sync."""
        assert batch.budget is not None  # noqa: S101 - batches without a budget run eager
        part = self.layout if len(batch.items) == len(self.layout.items) else batch.layout(self.layout)
        arena.load_layout(part, batch.budget, pointer, *self._batch)
        return part.total

    def finish(self, wait: bool) -> None:
        """Do nothing: the host has checked the items."""


class DeviceItems:
    """Items that only the GPU has seen: one replay batch, whose graph checks them.

    Args:
        description: The layout argument and the columns, by name.
        rows: Number of rows of the call.
        checks: Keeps the findings.

    Attributes:
        everything: The slice of all items.
        nan_masks: Added to outputs, so that a wrong call does not pass for a right one.
    """

    def __init__(self, description: Mapping[str, Any], rows: int, checks: GpuChecks) -> None:
        # An alias of the sizes, which the graph reads, because others may give the caller's tensor other memory.
        (name, sizes), *_ = description.items()
        self._description = {**description, name: sizes.detach()}
        self.everything = ItemSlice(0, rows, 0, len(sizes))
        self.nan_masks: Mapping[torch.dtype, Tensor] | None = checks.nan_masks
        self._checks = checks
        self._number = 0

    def slices(self, batch: ReplayBatch) -> Sequence[tuple[ItemSlice, ItemSlice]]:
        """Return the slices of the rows and items of a replay batch in the call and in its replay."""
        return [(self.everything, self.everything)]

    def load(self, arena: Arena, batch: ReplayBatch, pointer: RowPointer | None = None) -> int:
        """Copy the items into the arena; return their rows. Queued on the current stream; no sync."""
        assert batch.budget is not None  # noqa: S101 - batches without a budget run eager
        self._checks.calls += 1
        self._number = self._checks.calls
        _, rows, _, items, *_ = self.everything
        arena.load_table(self._description, self._number, items, rows, pointer)
        return rows

    def finish(self, wait: bool) -> None:
        """Queue the copy of the findings to the host, or wait for it and raise what is wrong."""
        self._checks.fetch()
        if wait:
            if self._checks.device.type == "cuda":
                current_stream(self._checks.device).synchronize()
            self._checks.raise_finding(self._number)
