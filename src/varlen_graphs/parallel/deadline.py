"""Replays that do not end: found by asking their events, because nothing else looks at collectives in a graph."""

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from varlen_graphs.capture.pool import current_stream

POLLS = 20
"""How often events are asked until the deadline, while replays are under way."""


class Deadline:
    """Watches calls on a GPU from a thread of its own, which sleeps while none is under way.

    A poll at the next call would not do: whoever waits for the output of a replay that hangs makes no next call.

    Args:
        seconds: How long no call may end, while some are under way.
        device: The GPU.
        late: Called once, from the thread, when that has happened.
    """

    def __init__(self, seconds: float, device: torch.device, late: Callable[[], None]) -> None:
        self._seconds = seconds
        self._device = device
        self._late = late
        self._under_way: deque[tuple[torch.cuda.Event, float]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._progress = 0.0
        self._awake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Watch what is queued on the current stream up to now. Records an event; no sync."""
        self._under_way.append((self._record(), time.monotonic()))
        self._wake()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._awake.set()

    def is_late(self) -> bool:
        """Whether calls are under way of which none has ended for too long. Forgets those that have."""
        while self._under_way and self._under_way[0][0].query():
            self._spare.append(self._under_way.popleft()[0])
            self._progress = time.monotonic()
        if not self._under_way:
            return False
        return time.monotonic() - max(self._progress, self._under_way[0][1]) > self._seconds

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(current_stream(self._device))
        return event

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="varlen_graphs deadline", daemon=True)
            self._thread.start()
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or asking an event would make a context on the first GPU
        while not self._closed:
            self._awake.wait()
            try:
                late = self.is_late()
            except RuntimeError:  # of the device: whoever uses it next is told
                return
            if late:
                self._late()
                return
            if self._under_way:
                time.sleep(self._seconds / POLLS)
                continue
            self._awake.clear()
            if self._under_way or self._closed:  # since it was looked at
                self._awake.set()
