"""Runs of a shadow that may not write to what it shares with the module itself."""

from collections.abc import Callable
from typing import Any

import torch

from varlen_graphs.errors import CaptureError
from varlen_graphs.shadows.shadow import Shadow, address_of
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, user_lines
from varlen_graphs.torch_dispatch.rules import written_arguments
from varlen_graphs.torch_dispatch.thread_modes import Result, RunMode, run_under

REMEDY = (
    "If it initialises itself from its first rows, run it once on real ones before the first capture, as the first "
    "call does. If it does so in every call (running statistics), call module.eval(), or run it without graphs "
    "(backend='eager')"
)


class SharedWrites(RunMode):
    """Dispatch mode that refuses an operator, before it runs, that writes to a tensor which a shadow shares.

    Attributes:
        written: Addresses of other memory that was written.
    """

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(shadow.random)
        self.written: set[int] = set()
        self._shadow = shadow
        self._before = False
        self._shared = {*map(address_of, shadow.shared)} - {0}

    @classmethod
    def guard(cls, shadow: Shadow, run: Callable[[], Result]) -> Result:
        """Call a function that runs a shadow, unless one of these watches its runs already."""
        return run() if shadow.is_watched else run_under(run, cls(shadow))

    def __enter__(self) -> Any:
        """Push the mode."""
        self._before, self._shadow.is_watched = self._shadow.is_watched, True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Pop the mode."""
        super().__exit__(*error)
        self._shadow.is_watched = self._before

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        for tensor in written_arguments(func, args, kwargs) if isinstance(func, torch._ops.OpOverload) else ():
            if (address := address_of(tensor)) in self._shared:
                held = (one for one in self._shadow.held if isinstance(one.value, torch.Tensor))
                path = next((one.path for one in held if address_of(one.value) == address), "a tensor of a part")
                raise CaptureError(
                    f"{type(self._shadow.original).__name__} writes to {path!r}, which graphs read: a capture would "
                    f"change it\n  at {next(user_lines(), UNKNOWN_LINE)}\n{REMEDY}"
                )
            self.note_write(address)
        return func(*args, **kwargs)

    def note_write(self, address: int) -> None:
        """Note that memory is written which the shadow does not share."""
        self.written.add(address)
