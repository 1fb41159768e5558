"""Memory that graphs share, and the turn-taking this asks for."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from varlen_graphs.capture.memory import device_bytes
from varlen_graphs.errors import SpecError, StaleGraphError
from varlen_graphs.watch.owners import PLAIN


class Pool:
    """One CUDA graph memory pool, shareable between encoders: `GraphedEncoder(..., pool=pool)`.

    Graphs of one pool use the same memory for their intermediate tensors, so they never run at the same time: a replay
    takes the pool's lock, and its stream waits for the end of the previous replay, output copies included.

    All encoders of a pool are on one device. On the CPU (the tape) a pool is the lock alone.

    Attributes:
        lock: What a replay takes.
        device: Where its encoders are; `None` before the first.
        turn: How often the pool was used: by calls, captures and the like, which write its memory.
        busy: Whether an encoder captures graphs: whoever wants the pool's turn waits for it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.device: torch.device | None = None
        self.turn = 0
        self.busy = False
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[int, int]] = WeakKeyDictionary()
        self._handle: Any = None
        self._handles: set[tuple[int, int]] = set()
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self._lent_on: torch.cuda.Stream | None = None
        self._forks = _forks.count

    def bind(self, device: torch.device) -> None:
        """Fix the device, at the first encoder.

        Raises:
            SpecError: The pool is in use on another device.
        """
        if self.device is None:
            self.device, self._forks = device, _forks.count
        elif self.device != device:
            raise SpecError(f"this pool is on {self.device}, the encoder on {device}: use a pool for each device")

    def check_process(self) -> None:
        """Whether this is the process that used the pool first. In another one not even pinned memory may be read.

        Raises:
            StaleGraphError: This process was forked from that one.
        """
        if self.device is not None and self._forks != _forks.count:
            raise StaleGraphError(
                "this process was forked from one where the encoder, or another one of its pool, was in use; graphs and"
                " CUDA do not survive that: start workers with multiprocessing's 'spawn', or make the encoder in the"
                " worker"
            )

    @property
    def _inherited(self) -> bool:
        """Whether another process used this pool, from which this one was forked."""
        return self.device is not None and self._forks != _forks.count

    def new_graph(self) -> tuple[torch.cuda.CUDAGraph, Any, torch.cuda.Stream]:
        """An empty graph, the handle of the memory it is to be captured in, and the stream to capture on.

        Who captures it instantiates it.
        """
        if not self._graphs or self._handle is None or self._stream is None:
            # The memory behind a handle is gone once its last graph is. The stream goes with it, because torch keeps
            # scratch memory for cuBLAS by stream, and graphs keep its address: for a new stream it comes from the pool.
            self._handle = torch.cuda.graph_pool_handle()
            self._handles.add(tuple(self._handle))
            self._stream = torch.cuda.Stream(self.device)
            torch.cuda.empty_cache()  # a capture cannot free what warm-up left, and would run out of memory beside it
        return torch.cuda.CUDAGraph(keep_graph=True), self._handle, self._stream

    def add(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Count a graph that was captured: while there is one, the memory behind the handle lives."""
        self._graphs[graph] = tuple(handle)

    def abandon_handle(self) -> None:
        """Use other memory for later captures, after one in this memory failed."""
        self._handle = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The pool's turn: what is queued inside runs after all that was queued inside before.

        Raises:
            StaleGraphError: The pool was in use before this process was forked; its lock may be held for good.
        """
        if self._forks != _forks.count:
            self.check_process()
        with self.lock:
            if self.device is None or self.device.type != "cuda":
                yield
                return
            stream = current_stream(self.device)
            if self._done is None:
                self._done = torch.cuda.Event()
            if not self._done.query():  # what has run need not be waited for, which takes longer than to ask
                stream.wait_event(self._done)
            if self._lent_on is not None and self._lent_on != stream:
                stream.wait_stream(self._lent_on)  # whoever borrowed there may have queued reads after the replay
            try:
                yield
            finally:
                self._done.record(stream)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Be `busy` inside, which is under the lock; what a module captures while it is captured ends nothing."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def advance(self) -> None:
        """Count that memory is about to be written: what was lent before is void."""
        self.turn += 1
        self._lent_on = None

    def lend(self) -> int:
        """Let what the last replay wrote be read on the current stream, as long as `turn` stays what this returns."""
        if self.device is not None and self.device.type == "cuda":
            self._lent_on = current_stream(self.device)
        return self.turn

    def synchronize(self) -> None:
        """Wait for the end of the last replay; in a forked process there is none."""
        if self._done is not None and not self._inherited:
            self._done.synchronize()

    def poison(self) -> None:
        """Fill the pool with NaN (bytes 0xFF), for tests: a replay that is still right reads nothing stale."""
        if not self._handles:
            return
        with self.exclusive(), torch.cuda.device(self.device):
            for segment in self._segments(self._handles):
                device_bytes(segment["address"], segment["total_size"]).fill_(0xFF)

    def bytes(self) -> int:
        """What graphs of all encoders in the pool hold: 0 on the CPU, and when there are none."""
        live = set(self._graphs.values())
        return sum(segment["total_size"] for segment in self._segments(live)) if live else 0

    def _segments(self, handles: set[tuple[int, int]]) -> list[Any]:
        """What torch's allocator holds behind handles."""
        snapshot = torch.cuda.memory_snapshot()
        return [segment for segment in snapshot if tuple(segment["segment_pool_id"]) in handles]

    def kept(self) -> list[Tensor]:
        """The tensors of the process that live in the pool. Looks at all objects there are."""
        live = [
            range(block["address"], block["address"] + block["size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) in self._handles
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        tensors = [found for found in gc.get_objects() if type(found) in PLAIN and found.is_cuda]
        return [t for t in tensors if any(t.untyped_storage().data_ptr() in block for block in live)]


class _Forks:
    """Counts the forks that lead to this process."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._one_more)

    def _one_more(self) -> None:
        self.count += 1


_forks = _Forks()

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(device)`, whose lookup takes longer than all that is queued here."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


_AS_IT_IS = nullcontext()


def on_device(device: torch.device) -> Any:
    """Make `device` current where it is a GPU."""
    current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _AS_IT_IS if current else torch.cuda.device(device)
