"""Modes of a thread, restored after an interrupt that came while a context manager was entered or left."""

import gc
from contextlib import AbstractContextManager
from typing import Any

import torch

from varlen_graphs.watch.thread_modes import ThreadState


def outside_inference() -> AbstractContextManager[Any]:
    """Return `torch.inference_mode(False)` as a context manager of C++, which no interrupt can leave half entered."""
    guard: AbstractContextManager[Any] = torch._C._InferenceMode(False)
    return guard


def interrupt_behind(error: BaseException) -> BaseException | None:
    """Return the interrupt that was being handled when an error was raised, as of a mode left half entered."""
    following = error.__context__
    while following is not None and not isinstance(following, KeyboardInterrupt | SystemExit):
        following = following.__context__
    return following


class Surroundings:
    """Modes of torch in the current thread, its stream and the garbage collector, as they are now.

    Python delivers an interrupt between two instructions, so also inside the `__enter__` or `__exit__` of torch's
    context managers: these then leave behind what they had set, and no `with` statement undoes it.
    """

    def __init__(self) -> None:
        self._modes = ThreadState.now()
        self._collects = gc.isenabled()
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Set all as it was. Modes that were entered since and are still open end here."""
        self._modes.restore()
        for kind, casts, dtype in self._casts:
            torch.set_autocast_enabled(kind, casts)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches_casts)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        if self._collects:
            gc.enable()
