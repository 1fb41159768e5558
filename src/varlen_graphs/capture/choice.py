"""Whether graphs answer a call, and which backend captures them."""

import torch
from torch import nn

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.choose import BackendName, choose_backend
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.state import State
from varlen_graphs.errors import warn
from varlen_graphs.spec.call import Call

NO_GRAPHS = "no CUDA graphs here"


class Choice:
    """Chooses between graphs and eager.

    Args:
        module: The module, for its name.
        state: The state that graphs hold for.
        backend: The backend that was asked for.
        pool: Where graphs are captured.
    """

    def __init__(self, module: nn.Module, state: State, backend: BackendName, pool: Pool) -> None:
        self._name = type(module).__name__
        self._state = state
        self._backend: BackendName = backend
        self._pool = pool
        self._warned = False

    def of(self, call: Call) -> tuple[str, Backend | None]:
        """What captures, or why no graph can answer this call."""
        reason = call.beyond or self._state.why_eager(call.rows.device.type)
        return (reason, None) if reason else (NO_GRAPHS, self.backend(call.rows.device))

    def backend(self, device: torch.device) -> Backend | None:
        """What captures on a device; `None`, with one warning if it was not asked for, where nothing does."""
        backend = choose_backend(self._backend, device, self._pool)
        if backend is None and self._backend == "auto" and not self._warned:
            self._warned = True
            warn(
                f"{self._name} is on {device}, where there are no CUDA graphs: calls run eager. Pass backend='tape' to "
                "replay on the CPU what a graph would, or backend='eager' to say so."
            )
        return backend
