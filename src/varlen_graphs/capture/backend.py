"""What a capture backend is."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

CAPTURING = threading.RLock()
"""One capture at a time in a process, its warm-up included: what is set for it (torch's compiler off while a run is
watched, backends of attention timed) holds for all threads, and two that overlap would leave it set."""

if hasattr(os, "register_at_fork"):  # who held it at the fork is not in the child
    os.register_at_fork(after_in_child=CAPTURING._at_fork_reinit)  # type: ignore[attr-defined]


class Graph(Protocol):
    """A captured run.

    Attributes:
        outputs: What the run returned, as aliases of the memory where each replay writes it.
    """

    outputs: list[Tensor]

    @property
    def bytes(self) -> int:
        """What it takes beside the pool."""

    def replay(self) -> None:
        """Run again what was captured, over the same memory."""


class Backend(Protocol):
    """A way to capture a run of tensor operations and replay it."""

    def capture(self, run: Callable[[], list[Tensor]], name: str) -> Graph:
        """Capture one `run`, which was run before for warm-up. The caller holds `CAPTURING`.

        Args:
            run: Reads static memory only, and returns its outputs. Called once, or again where another thread or
                memory that can be freed was in the way.
            name: What profiles and messages call it.

        Raises:
            CaptureError: `run` does something that cannot be part of a graph.
            torch.OutOfMemoryError: There is no memory left.
        """

    def kept(self, graphs: Sequence[Any]) -> list[Tensor]:
        """Tensors that captured runs made and somebody keeps: no outputs, but in the memory that replays write."""
