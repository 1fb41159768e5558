"""Detect replays that do not end. Polls events, because torch does not watch collectives inside graphs."""

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from varlen_graphs.capture.stream_order import current_stream

POLLS = 20
"""Polls of the events per deadline, while calls are pending."""


class Deadline:
    """Watches calls on a GPU from a thread; calls `late` there, once, if none ends for some seconds."""

    # Polling at the next call is not enough: a caller that waits for the output of a hanging replay makes no next call.
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
        """Watch the work queued on the current stream so far. Records an event; no sync."""
        self._under_way.append((self._record(), time.monotonic()))
        self._wake()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._awake.set()

    def is_late(self) -> bool:
        """Return True if calls are pending and none has ended for too long. Forgets calls that have ended."""
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
            torch.cuda.set_device(self._device)  # else querying an event creates a context on the first GPU
        while not self._closed:
            self._awake.wait()
            try:
                late = self.is_late()
            except RuntimeError:  # an error of the device, which its next use raises
                return
            if late:
                self._late()
                return
            if self._under_way:
                time.sleep(self._seconds / POLLS)
                continue
            self._awake.clear()
            if self._under_way or self._closed:  # since the check above
                self._awake.set()
