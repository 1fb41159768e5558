"""Progress of a capture and of its check, on a terminal."""

import os
import sys
import time
from contextlib import suppress

DELAY = 2.0
"""Seconds after which work on graphs shows how far it is."""


class Progress:
    """A line on a terminal that says how far work on graphs is, and goes at its end; nothing anywhere else.

    It has no lock and no thread: an interrupt leaves nothing behind that another capture would wait for.

    Args:
        doing: What is done with them.
        total: Number of graphs.
    """

    def __init__(self, doing: str, total: int) -> None:
        self._doing, self._done, self._total = doing, 0, total
        self._start = time.monotonic()
        self._shown = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")

    def update(self) -> None:
        """Count a graph, and show how many there are."""
        self._done += 1
        took = time.monotonic() - self._start
        if took >= DELAY and not os.environ.get("TQDM_DISABLE"):
            self._write(f"\r{self._doing}: {self._done}/{self._total} graphs in {took:.0f} s ")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # closed, or none: no reason to end a capture
            if sys.stderr.isatty():
                self._shown = len(text)
                sys.stderr.write(text)
                sys.stderr.flush()
