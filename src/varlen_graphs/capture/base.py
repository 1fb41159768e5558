"""What a capture backend is."""

import threading
from collections.abc import Callable
from typing import Protocol

CAPTURING = threading.Lock()
"""One capture at a time in a process."""


class Graph(Protocol):
    """A captured run."""

    def replay(self) -> None:
        """Run again what was captured, over the same memory."""


class Backend(Protocol):
    """A way to capture a run of tensor operations and replay it."""

    def capture(self, run: Callable[[], None], name: str) -> Graph:
        """Capture one `run`, which was run before for warm-up.

        Args:
            run: Reads and writes static memory only. Called once or more.
            name: What profiles and messages call it.

        Raises:
            CaptureError: `run` does something that cannot be part of a graph.
        """
