"""The submodule that is running."""

import sys
from types import FrameType, TracebackType

from torch import nn

_CALL = nn.Module._call_impl.__code__


class ModuleTracker:
    """Names the submodule of a module that is running, found on the stack: hooks would be those of all threads."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}

    @property
    def path(self) -> str:
        """Path of the innermost running submodule; the module itself is `""`."""
        frame: FrameType | None = sys._getframe(1)
        path: str | None = None
        while frame is not None and path is None:  # a module made in the forward counts as the one around it
            path = self._names.get(id(frame.f_locals["self"])) if frame.f_code is _CALL else None
            frame = frame.f_back
        return path or ""

    def path_of(self, trace: TracebackType | None) -> str:
        """Return the path of the innermost submodule in a traceback."""
        path = ""
        while trace is not None:
            path = self._names.get(id(trace.tb_frame.f_locals.get("self")), path)
            trace = trace.tb_next
        return path
