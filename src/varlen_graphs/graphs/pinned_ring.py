"""A ring of pinned blocks, for uploads that the host never waits for."""

from array import array
from collections import deque
from ctypes import memmove

import torch
from torch import Tensor

from varlen_graphs.capture.stream_order import current_stream

BLOCKS = 16
"""Number of blocks that are pinned at once: pinning takes longer than a whole call."""


class PinnedRing:
    """Uploads small arrays of integers to a device, each through a block of pinned memory of its own.

    A block is written again only after the copy from it has run. If all blocks are in flight, the ring grows instead of
    waiting; CUDA's own queue bounds the number of calls in flight. On the CPU a copy ends at once, and one block
    suffices.

    Args:
        size: Largest number of integers in an upload.
        device: The device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._pinned = device.type == "cuda"
        self._blocks: deque[_PinnedBlock] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def upload(self, values: "array[int]", static: Tensor) -> None:
        """Copy int64 `values` into `static`, int64 `[len(values)]`. Queued on the current stream; no sync."""
        if not self._blocks or not self._blocks[0].is_free():
            blocks = BLOCKS if self._pinned else 1
            slab = torch.empty(blocks, self._size, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
            self._blocks.extendleft(_PinnedBlock(memory, self._pinned) for memory in slab)
        block = self._blocks.popleft()
        block.send(values, static)
        self._blocks.append(block)


class _PinnedBlock:
    """One block of host memory, and the event at the end of the last copy from it."""

    def __init__(self, memory: Tensor, pinned: bool) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self._copied = torch.cuda.Event() if pinned else None

    def is_free(self) -> bool:
        return self._copied is None or self._copied.query()

    def send(self, values: "array[int]", static: Tensor) -> None:
        memmove(self._address, values.buffer_info()[0], values.itemsize * len(values))
        memory = self._memory if len(values) == len(self._memory) else self._memory[: len(values)]
        static.copy_(memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record(current_stream(static.device))
