"""The order of GPU work that uses one memory from several streams and threads."""

import threading
from typing import Optional

import torch

from varlen_graphs.capture.driver import spare_captures

OpenBlock = tuple[torch.cuda.Stream | None, int, Optional["OpenBlock"]]
"""Stream, thread and outer block of a block that is open, or that an interrupt ended before its end was recorded.

A plain tuple, because every call makes one.
"""


class StreamOrder:
    """Queues the GPU work of a `with` block behind that of all blocks before it. To be entered under a lock.

    An interrupt may come between any two instructions, also before the first of `__exit__`. The block then stays in
    `_open`, and those after it wait for its stream.

    Attributes:
        device: The device of the memory; nothing is queued unless it is a GPU.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._done: torch.cuda.Event | None = None
        self._open: OpenBlock | None = None

    def __enter__(self) -> None:
        if self.device is None or self.device.type != "cuda":
            self._open = None, 0, self._open
            return
        stream, thread, outer = current_stream(self.device), threading.get_ident(), self._open
        if self._done is None:
            self._done = torch.cuda.Event()
        if not self._done.query():  # querying is cheaper than waiting for an event that is done
            stream.wait_event(self._done)
        while outer is not None:
            follow(stream, outer[0])
            if outer[1] == thread:
                break
            outer = outer[2]  # under the lock there is no other thread: an interrupt left it
        self._open = stream, thread, outer

    def __exit__(self, *error: object) -> None:
        assert self._open is not None  # noqa: S101 - it was entered
        stream, _, outer = self._open
        if stream is not None and self._done is not None:
            if outer is not None:  # ends after this block, and with the event that counts
                follow(outer[0], stream)
            self._done.record(stream)
        self._open = outer

    def synchronize(self) -> None:
        """Wait on the host for the end of all blocks, and for what is queued on the streams of open ones.

        A capture of the caller's goes on: the collector may call this at any time.
        """
        block = self._open
        while block is not None:
            stream, _, block = block
            if stream is not None:
                stream.synchronize()
        if self._done is not None:
            with spare_captures():
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
