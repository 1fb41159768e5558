"""What a capture backend is."""

from collections.abc import Callable
from typing import Protocol


class Graph(Protocol):
    """A captured run."""

    def replay(self) -> None:
        """Run again what was captured, over the same memory."""


class Backend(Protocol):
    """A way to capture a run of tensor operations and replay it."""

    def prepare(self) -> None:
        """Called once before the first capture, after its warm-up."""

    def capture(self, run: Callable[[], None], name: str) -> Graph:
        """Capture one `run`, which was run before for warm-up.

        Args:
            run: Reads and writes static memory only. Called once or more.
            name: What profiles and messages call it.

        Raises:
            CaptureError: `run` does something that cannot be part of a graph.
        """
