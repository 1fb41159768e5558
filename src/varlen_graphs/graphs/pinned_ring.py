"""A ring of pinned blocks, for uploads that the host never waits for."""

from array import array
from collections import deque
from ctypes import memmove

import torch
from torch import Tensor

from varlen_graphs.capture.driver import copy_to_device
from varlen_graphs.capture.stream_order import current_stream

BLOCKS = 16
"""Number of blocks that are pinned at once, because pinning takes longer than a whole call."""


class PinnedRing:
    """Uploads small arrays of integers to a device, each through a block of pinned memory of its own.

    Blocks are pinned in slabs, and a slab is written again only after all copies from it have run. If all are in
    flight, the ring grows instead of waiting; CUDA's own queue bounds the number of calls in flight. On the CPU a copy
    ends at once, and one block suffices.

    Uploads come from one stream after another, each behind what was queued on the one before: one event after the last
    copy from a slab tells that all have run.

    Args:
        size: Largest number of integers in an upload.
        device: The device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._pinned = device.type == "cuda"
        self._device = device.index
        self._all: list[_Slab] = []  # kept to the end: torch's allocator does not know of our copies from them
        self._slabs: deque[_Slab] = deque()  # full ones
        self._slab: _Slab | None = None

    def __len__(self) -> int:
        return sum(len(slab.blocks) for slab in self._all)

    def upload(self, values: "array[int]", static: Tensor) -> None:
        """Copy int64 `values` into `static`, int64 `[len(values)]`. Queued on the current stream; no sync."""
        slab = self._slab
        if slab is None or slab.used == len(slab.blocks):
            self._slab = None  # first: after an interrupt a slab is used no more, rather than queued twice
            slab = self._slab = self._next(slab, static.device)
        memory, address = slab.blocks[slab.used]
        slab.used += 1
        source, count = values.buffer_info()
        memmove(address, source, 8 * count)
        here = self._pinned and torch._C._cuda_getDevice() == self._device  # else the copy might use its stream 0
        if here and copy_to_device(
            static.data_ptr(), address, 8 * count, torch._C._cuda_getCurrentRawStream(self._device)
        ):
            return
        static.copy_(memory[:count], non_blocking=True)

    def _next(self, last: "_Slab | None", device: torch.device) -> "_Slab":
        """Return a slab that no copy reads any more, in place of the last one, which is full."""
        if last is not None:
            if last.copied is not None:
                last.copied.record(current_stream(device))
            self._slabs.append(last)
        if self._slabs and (self._slabs[0].copied is None or self._slabs[0].copied.query()):
            slab = self._slabs.popleft()
            slab.used = 0
            return slab
        self._all.append(_Slab(BLOCKS if self._pinned else 1, self._size, self._pinned))
        return self._all[-1]


class _Slab:
    """Blocks of host memory with their addresses, the number of those in use, and the event after the last copy."""

    def __init__(self, blocks: int, size: int, pinned: bool) -> None:
        slab = torch.empty(blocks, size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.blocks = [(memory, memory.data_ptr()) for memory in slab]
        self.used = 0
        self.copied = torch.cuda.Event() if pinned else None
