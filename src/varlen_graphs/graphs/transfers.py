"""Transfers: copies between the caller's memory and that of a graph, which the graph makes at each replay.

A call writes in front of its item table where its rows lie and where its outputs belong. So it launches nothing but its
graph.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from varlen_graphs.kernels.transfer.op import transfer_memory
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.entries import Extent

MOST = 16
"""Number of transfers of a replay, at most: that of its rows, which comes first, and those of its outputs."""

FIELDS = 4
"""Number of integers of a transfer; see `varlen_graphs.kernels.transfer.reference.transfer_memory`."""

UNIT = 8
"""Addresses and sizes are multiples of so many bytes."""

NOTHING: Sequence[int] = (0, 0, 0, 0)
"""A transfer that copies nothing."""

NONE = array("q", [*NOTHING] * MOST)
"""As many of these as there are transfers."""


class Transfers:
    """The transfers of one replay after another, in static memory.

    Args:
        memory: int64 `[MOST * FIELDS]`, where graphs read them.
        rows: The rows of the arena.
        extent: Extent of rows.
    """

    def __init__(self, memory: Tensor, rows: Tensor, extent: Extent) -> None:
        self._memory = memory.view(MOST, FIELDS)
        self._rows = rows
        self._addresses = range(rows.data_ptr(), rows.data_ptr() + rows.nbytes)
        self._row_bytes = _entry_bytes(rows)
        self._takes_rows = len(extent.dims) == 1 and not (extent.gaps or self._row_bytes % UNIT)

    def of_rows(self, call: Call, spans: Sequence[tuple[Span, Span]]) -> Sequence[int]:
        """Return the transfer of the rows of a replay; `NOTHING` if it cannot take them as they are.

        Args:
            call: The call.
            spans: Places of its rows, and those in the replay.
        """
        rows, (there, here) = call.rows, spans[0]
        if (
            not self._takes_rows
            or len(spans) > 1
            or call.staged
            or call.to_pack
            or rows.dtype is not self._rows.dtype
            or rows.device != self._rows.device
            or not rows.is_contiguous()
            or rows.is_neg()  # in memory with the other sign
            or there.row + there.rows > rows.shape[0]
        ):
            return NOTHING
        source, each = rows.data_ptr() + self._row_bytes * there.row, self._row_bytes
        if source % UNIT or source in self._addresses or not rows.data_ptr():  # tensors of zeros may have no memory
            return NOTHING
        return source, self._addresses.start + each * here.row, each * here.rows, 0

    def make_of_rows(self, budget: Budget) -> None:
        """Transfer the rows: what a graph begins with. Queued on the current stream; no sync."""
        if self._takes_rows:
            transfer_memory(self._memory[:1], budget.rows * self._row_bytes)

    def make_of_outputs(self, outputs: Sequence[Tensor], extents: Sequence[Extent]) -> bool:
        """Transfer the outputs: what a graph ends with. Queued on the current stream; no sync.

        Returns False, and does nothing, unless all are contiguous, with their entries first, and not too many.
        """
        possible = 0 < len(outputs) < MOST and all(map(_can_transfer, outputs, extents))
        if possible:
            transfer_memory(self._memory[1 : 1 + len(outputs)], max([output.nbytes for output in outputs]))
        return possible


class _Output(NamedTuple):
    """An output of a graph, with its entries in dimension 0."""

    memory: Tensor
    address: int
    entries: int
    entry: tuple[int, ...]  # shape of one
    bytes: int  # of one
    extent: Extent


class OutputTransfers:
    """Transfers of the outputs of a graph to new tensors.

    Args:
        outputs: The outputs, in the memory where the graph writes them.
        extents: Their extents.
    """

    def __init__(self, outputs: Sequence[Tensor], extents: Sequence[Extent]) -> None:
        alike = [next(one for one in extents if one == extent) for extent in extents]  # which are then the same
        self._outputs = [
            _Output(x, x.data_ptr(), x.shape[0], tuple(x.shape[1:]), _entry_bytes(x), extent)
            for x, extent in zip(outputs, alike, strict=True)
        ]

    def allocate(self, everything: Span) -> list[Tensor]:
        """Return a new tensor for the entries of a call of each output. Uninitialised; no launch."""
        tensors, before, count = [], None, 0
        for memory, _, _, entry, _, extent in self._outputs:
            if extent is not before:
                before, count = extent, extent.place(everything)[0].stop
            tensors.append(memory.new_empty((count, *entry)))
        return tensors

    def to(self, tensors: Sequence[Tensor], there: Span, here: Span) -> Sequence[int]:
        """Return the transfers of a span of a replay to one of these tensors; none if an output has too few entries."""
        numbers: list[int] = []
        before = None
        for (_, address, entries, _, size, extent), tensor in zip(self._outputs, tensors, strict=True):
            if extent is not before:
                before, (source,) = extent, extent.place(here)
                target = source.start if there is here else extent.place(there)[0].start
            if source.stop > entries:
                return ()
            first = source.start
            numbers += address + size * first, tensor.data_ptr() + size * target, size * (source.stop - first), 0
        return numbers


def _can_transfer(output: Tensor, extent: Extent) -> bool:
    if len(extent.dims) != 1 or extent.rows_dim or extent.gaps or not output.is_contiguous():
        return False
    return not (_entry_bytes(output) % UNIT or output.data_ptr() % UNIT)


def _entry_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.itemsize  # not its stride, which may be anything for a single entry
