"""Memory pool that graphs share, and the lock and stream order that sharing requires."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from varlen_graphs.capture.driver import next_private_stream
from varlen_graphs.capture.forks import FORKS
from varlen_graphs.capture.memory import device_bytes
from varlen_graphs.capture.stream_order import StreamOrder
from varlen_graphs.errors import CaptureError, SpecError, StaleGraphError

_FORKED = (
    "CUDA and graphs do not survive a fork: start workers with multiprocessing's 'spawn', or create the encoder in the "
    "worker"
)


class Pool:
    """CUDA graph memory pool that encoders can share: `GraphedEncoder(..., pool=pool)`.

    Graphs of one pool use the same memory for their intermediate tensors, so they never run at the same time: a replay
    takes the pool's lock, and its stream waits for the end of the previous replay, output copies included.

    All encoders of a pool are on one device. On the CPU (the tape) a pool is only the lock.

    Attributes:
        lock: Lock held by every replay and capture.
        order: Queues the GPU work of a block behind that of the blocks before.
        device: Device of its encoders; `None` before the first.
        busy: True while an encoder captures graphs; others then wait for the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.order = StreamOrder()
        self.device: torch.device | None = None
        self.busy = False
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[int, int]] = WeakKeyDictionary()
        self._handle: Any = None
        self._handles: set[tuple[int, int]] = set()
        self._stream: torch.cuda.Stream | None = None
        self._forks = FORKS.count

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pool is neither copied nor pickled, because its memory belongs to this process: make another one, such "
            "as vg.options.Pool()"
        )

    def bind(self, device: torch.device) -> None:
        """Set the device when the first encoder joins.

        Raises:
            SpecError: The pool belongs to another device.
            StaleGraphError: This process was forked after CUDA was used.
        """
        if self.device is None:
            if device.type == "cuda" and torch.cuda._is_in_bad_fork():
                raise StaleGraphError(f"this process was forked after CUDA was used; {_FORKED}")
            self.device = self.order.device = device
            self._forks = FORKS.count
        elif self.device != device:
            raise SpecError(
                f"the pool is on {self.device}, the encoder on {device}: expected one device; give each device a pool"
            )

    def check_process(self) -> None:
        """Check that this is the process that first used the pool. A forked one may not even read pinned memory.

        Raises:
            StaleGraphError: This process was forked after the pool was used.
        """
        if self.device is not None and self._forks != FORKS.count:
            raise StaleGraphError(f"this process was forked after an encoder of the pool was used; {_FORKED}")

    def check_usable(self, module: str) -> None:
        """Check that an encoder of this module may be used here: in this process, outside of a capture by this thread.

        Raises:
            StaleGraphError: This process was forked after the pool was used.
            CaptureError: A module that this thread captures calls the encoder.
        """
        if self._forks != FORKS.count:
            self.check_process()
        if _thread.captures is not None:
            raise CaptureError(
                f"the encoder of {module} was called inside of {_thread.captures}, which another encoder is capturing: "
                f"graphs do not nest; let {_thread.captures} call the module itself (encoder.module, or vg.unwrap the "
                f"model), or make no encoder of {_thread.captures}"
            )

    @property
    def _is_forked(self) -> bool:
        """True if this process was forked after the pool was used."""
        return self.device is not None and self._forks != FORKS.count

    def new_graph(self) -> tuple[torch.cuda.CUDAGraph, Any, torch.cuda.Stream]:
        """Return an empty graph, the handle of the memory to capture it in, and the stream to capture it on.

        The caller instantiates the graph.
        """
        if self._handle is None or self._stream is None or tuple(self._handle) not in {*self._graphs.values()}:
            # The memory behind a handle is freed with its last graph, and after that no graph may be captured in it,
            # nor after a capture in it that failed as its first. The stream is replaced too: torch keeps a cuBLAS
            # workspace per stream, and graphs keep its address; for a new stream it is allocated from the pool.
            self._handle = torch.cuda.graph_pool_handle()
            self._handles.add(tuple(self._handle))
            assert self.device is not None  # noqa: S101 - its encoder was bound
            self._stream = next_private_stream(self.device.index)
            torch.cuda.empty_cache()  # a capture cannot free the memory that warm-up left cached
        return torch.cuda.CUDAGraph(keep_graph=True), self._handle, self._stream

    def add(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Register a captured graph; the memory behind its handle lives as long as one of its graphs."""
        self._graphs[graph] = tuple(handle)

    def abandon_handle(self) -> None:
        """Use new memory for later captures, after a capture in this memory failed."""
        self._handle = None

    def exclusive(self) -> AbstractContextManager[bool]:
        """Return the lock, to hold in a `with` block: `with pool.exclusive(), pool.order` if it queues GPU work.

        The lock is one of C, so no interrupt comes between taking it and the block, or leaves it held.

        Raises:
            StaleGraphError: This process was forked after the pool was used; its lock may be held forever.
        """
        if self._forks != FORKS.count:
            self.check_process()
        return self.lock

    @contextmanager
    def capturing(self, module: str) -> Iterator[None]:
        """Set `busy` inside, under the lock, and let encoders inside of the captured module know."""
        self.busy, _thread.captures = True, module
        _CAPTURING.add(threading.get_ident())
        try:
            yield
        finally:
            _CAPTURING.discard(threading.get_ident())
            self.busy, _thread.captures = False, None

    def synchronize(self) -> None:
        """Wait on the host for the end of the last replay; return at once in a forked process."""
        if not self._is_forked:
            self.order.synchronize()

    def poison(self) -> None:
        """Fill the pool with NaN (bytes 0xFF), for tests: a replay that is still correct reads nothing stale."""
        with self.exclusive(), self.order:
            for memory in self.memory():
                memory.fill_(0xFF)

    @contextmanager
    def live_memory_restored(self) -> Iterator[None]:
        """Save what tensors of the pool hold, which others may need, from who overwrites the whole pool inside."""
        live = self.memory(live=True)
        saved = [memory.clone() for memory in live]
        try:
            yield
        finally:
            for memory, before in zip(live, saved, strict=True):
                memory.copy_(before)

    def memory(self, live: bool = False) -> list[Tensor]:
        """Return the memory of the pool, uint8 `[bytes]` each: all of it, or that of tensors that are alive alone.

        Valid until the next capture or release. Empty on the CPU.
        """
        if not self._handles:
            return []
        segments = self._segments(self._handles)
        places = [(segment["address"], segment["total_size"]) for segment in segments]
        if live:
            blocks = [block for segment in segments for block in segment["blocks"]]
            places = [(block["address"], block["size"]) for block in blocks if block["state"] == "active_allocated"]
        with torch.cuda.device(self.device):
            return [device_bytes(*place) for place in places]

    def bytes(self) -> int:
        """Return the memory that graphs of all encoders hold in the pool, in bytes; 0 on the CPU."""
        live = set(self._graphs.values())
        return sum(segment["total_size"] for segment in self._segments(live)) if live else 0

    def _segments(self, handles: set[tuple[int, int]]) -> list[Any]:
        """Return the segments of torch's allocator behind some handles."""
        snapshot = torch.cuda.memory_snapshot()
        return [segment for segment in snapshot if tuple(segment["segment_pool_id"]) in handles]


class _Thread(threading.local):
    """State of this thread: `captures` is the name of the module that it is capturing, or `None`."""

    captures: str | None = None


_thread = _Thread()

_CAPTURING: set[int] = set()
"""Threads that capture."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CAPTURING.clear)


def others_capture() -> bool:
    """Return True while another thread captures a module."""
    return bool(_CAPTURING) and {threading.get_ident()} != _CAPTURING


def inside_capture() -> bool:
    """Return True while this thread captures a module."""
    return _thread.captures is not None


_NO_CHANGE = nullcontext()


def on_device(device: torch.device) -> Any:
    """Make `device` current where it is a GPU."""
    current = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return _NO_CHANGE if current else torch.cuda.device(device)
