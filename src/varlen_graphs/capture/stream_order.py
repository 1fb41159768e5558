"""The order of GPU work that uses one memory from several streams and threads."""

import threading
from typing import NamedTuple, Optional

import torch


class _OpenBlock(NamedTuple):
    """A block that is open, or that an interrupt ended before its end could be recorded."""

    stream: torch.cuda.Stream | None
    thread: int
    outer: Optional["_OpenBlock"]


class StreamOrder:
    """Queues the GPU work of a `with` block behind that of all blocks before it. To be entered under a lock.

    An interrupt may come between any two instructions, also before the first of `__exit__`. The block then stays in
    `_open`, and those after it wait for its stream.

    Attributes:
        device: The device of the memory; nothing is queued unless it is a GPU.
        read_on: A stream that may read the memory after its block, for the next block to wait for.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.read_on: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self._open: _OpenBlock | None = None

    def __enter__(self) -> None:
        stream, outer, thread = None, self._open, threading.get_ident()
        if self.device is not None and self.device.type == "cuda":
            stream = current_stream(self.device)
            if self._done is None:
                self._done = torch.cuda.Event()
            if not self._done.query():  # querying is cheaper than waiting for an event that is done
                stream.wait_event(self._done)
            if self.read_on is not None and self.read_on != stream:
                stream.wait_stream(self.read_on)
            while outer is not None:
                follow(stream, outer.stream)
                if outer.thread == thread:
                    break
                outer = outer.outer  # under the lock there is no other thread: an interrupt left it
        self._open = _OpenBlock(stream, thread, outer)

    def __exit__(self, *error: object) -> None:
        block = self._open
        assert block is not None  # noqa: S101 - it was entered
        if block.stream is not None and self._done is not None:
            if block.outer is not None:  # ends after this block, and with the event that counts
                follow(block.outer.stream, block.stream)
            self._done.record(block.stream)
        self._open = block.outer

    def synchronize(self) -> None:
        """Wait on the host for the end of all blocks, and for what is queued on the streams of open ones."""
        block = self._open
        while block is not None:
            if block.stream is not None:
                block.stream.synchronize()
            block = block.outer
        if self._done is not None:
            self._done.synchronize()


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream(device)` from a cache; torch's lookup is slower than the launches here."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


def follow(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """Let a stream wait for what is queued on another one; neither exists on the CPU."""
    if stream is not None and other is not None and other != stream:
        stream.wait_stream(other)
