"""Tracking of the submodule that is running."""

import threading
from types import TracebackType
from typing import Any

import torch.nn.modules.module as torch_module
from torch import nn


class ModuleTracker:
    """Tracks which submodules of a module are running, on the thread that enters it."""

    def __init__(self, module: nn.Module) -> None:
        self.paths: list[str] = []  # of the running submodules, innermost last; the module itself is ""
        self._names = {id(part): name for name, part in module.named_modules()}
        self._handles: list[Any] = []
        self._thread = 0

    @property
    def path(self) -> str:
        """Path of the innermost running submodule."""
        return self.paths[-1] if self.paths else ""

    def path_of(self, trace: TracebackType | None) -> str:
        """Return the path of the innermost submodule in a traceback."""
        path = ""
        while trace is not None:
            path = self._names.get(id(trace.tb_frame.f_locals.get("self")), path)
            trace = trace.tb_next
        return path

    def __enter__(self) -> "ModuleTracker":
        """Start tracking."""
        self._thread = threading.get_ident()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._begin),
            torch_module.register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop tracking."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            # A module created in the forward counts as part of the one that is running.
            self.paths.append(self._names.get(id(module), self.path))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self.paths:
            self.paths.pop()
