"""Rows and sizes of items in the caller's memory, which the graph of a replay reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_graphs.checks.values import check_not_freed
from varlen_graphs.declaration.call import Call
from varlen_graphs.kernels.copy_rows.op import copy_rows
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.packed_batch import has_padding
from varlen_graphs.outputs.entries import Extent, filled
from varlen_graphs.torch_dispatch.leaves import PLAIN_TENSORS

UNIT = 8
"""Graphs read memory in units of so many bytes, from addresses that are multiples of that."""

RowPointer = tuple[int, int, int]
"""Address of rows, their number, and 1 if they are those at indices; see `kernels.copy_rows.reference.copy_rows`."""

NO_ROWS: RowPointer = (0, 0, 0)
"""Content of the memory where a graph copies no rows."""


def address_of_sizes(sizes: Tensor) -> int:
    """Return the address of sizes of items, if a graph can read them as they lie in its table; 0 otherwise."""
    if type(sizes) not in PLAIN_TENSORS or sizes.dtype is not torch.int64 or sizes.shape[1:] != (3,):
        return 0
    address = sizes.data_ptr()
    return address if sizes.is_contiguous() and not sizes.is_neg() and address % UNIT == 0 else 0


class RowSource:
    """Copies the rows of replays out of the caller's memory, as the first operation of their graphs.

    A launch ahead of that of the graph would cost the host more than all of its checks. Padding becomes zeros, because
    a module may look at what earlier calls left there.

    Args:
        memory: int64 `[4]`, from which graphs read where the rows lie, and which row is the first of padding.
        gather_indices: int64 `[most rows]`, from which they read the indices of the real rows in a batch to pack; empty
            if the declaration packs none.
        rows: The static rows.
        extent: Extent of rows.
    """

    def __init__(self, memory: Tensor, gather_indices: Tensor, rows: Tensor, extent: Extent) -> None:
        self._memory = memory
        self._gather_indices = gather_indices
        self._rows = rows
        self._static = range(rows.data_ptr(), rows.data_ptr() + rows.nbytes)
        self._row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        self._gaps = extent.gaps
        self._copies = len(extent.dims) == 1 and not (extent.gaps or self._row_bytes % UNIT) and self._row_bytes > 0

    def of(self, call: Call, slices: Sequence[tuple[ItemSlice, ItemSlice]]) -> RowPointer | None:
        """Return where the rows of a replay lie; `None` if its graph cannot copy them as they are.

        Args:
            call: The call, which keeps the memory until the replay is queued.
            slices: Those of its rows, and those in the replay.

        Raises:
            InputError: The memory of the rows was freed.
        """
        rows, (there, here) = call.rows, slices[0]
        address, count = self._address(rows), here.rows
        if not address or len(slices) > 1 or call.staged:
            return None
        if call.to_pack:
            return address, count, int(has_padding(count, len(call.sizes), call.padded))
        if there.row + count > rows.shape[0]:  # never reads past the rows, whatever the slices
            return None
        return address + self._row_bytes * there.row, count, 0

    def whole(self, rows: Tensor) -> RowPointer | None:
        """Return where the rows of a replay of a whole call lie; `None` if its graph cannot copy them as they are.

        Raises:
            InputError: The memory of the rows was freed.
        """
        address = self._address(rows)
        return (address, rows.shape[0], 0) if address else None

    def _address(self, rows: Tensor) -> int:
        """Return the address of rows that graphs can copy as they are, or 0."""
        address = rows.data_ptr()
        if address == rows.storage_offset() * rows.itemsize:  # there is no memory
            check_not_freed(rows, "the rows")
            return 0
        if (
            not self._copies
            or rows.dtype is not self._rows.dtype
            or rows.device != self._rows.device
            or not rows.is_contiguous()
            or rows.is_neg()  # such memory holds other numbers than the tensor
            or rows.is_conj()
            or address % UNIT
            or address in self._static
        ):
            return 0
        return address

    def copy(self, most: int) -> None:
        """Write the first `most` rows: copies, and zeros as padding. Queued on the current stream; no sync.

        Floating rows with gaps are cleared by their extent, integers by the forward.
        """
        rows = self._rows[:most]
        if self._copies:
            copy_rows(self._memory, self._gather_indices, rows)
        elif rows.is_floating_point() and not self._gaps:  # of an odd width
            rows.copy_(filled(rows, torch.arange(most, device=rows.device) >= self._memory[3], 0))
