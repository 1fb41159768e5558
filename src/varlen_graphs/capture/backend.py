"""Interface of capture backends."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from varlen_graphs.torch_dispatch.host_constants import HostConstant

CAPTURE_LOCK = threading.RLock()
"""Held by the one capture of the process, warm-up included: attention backends are timed in it, for all threads."""

if hasattr(os, "register_at_fork"):  # the thread that held it does not exist in the child
    os.register_at_fork(after_in_child=CAPTURE_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


class Graph(Protocol):
    """A captured run.

    Attributes:
        outputs: Aliases of the outputs, in the memory where each replay writes them.
    """

    outputs: list[Tensor]

    @property
    def bytes(self) -> int:
        """Memory of the graph beside the pool, in bytes."""

    def replay(self) -> None:
        """Run the captured operations again, over the same memory."""


class Backend(Protocol):
    """Captures a run of tensor operations as a graph that can be replayed."""

    def capture(self, run: Callable[[], list[Tensor]], name: str, constants: Sequence[HostConstant] = ()) -> Graph:
        """Capture one call of `run`, after it has run for warm-up. The caller holds `CAPTURE_LOCK`.

        Args:
            run: Reads static memory only, and returns its outputs. Called once, or again if another thread disturbed
                the capture, or if memory was short and could be freed.
            name: Name in profiles and messages.
            constants: Those of the warm-up run. The caller keeps them for as long as the graph.

        Raises:
            CaptureError: `run` does something that cannot be part of a graph, or copies a host tensor to the device
                that differs from the constant of the warm-up run.
            torch.OutOfMemoryError: The device is out of memory.
        """
