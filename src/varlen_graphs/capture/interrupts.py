"""Modes of a thread, restored after an interrupt that came while a context manager was entered or left."""

import gc
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._python_dispatch as python_dispatch

_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Flags of torch about dispatch modes; code under `torch.compile` may run uncompiled where one is left set."""


def outside_inference() -> AbstractContextManager[Any]:
    """Return `torch.inference_mode(False)` as a context manager of C++, which no interrupt can leave half entered."""
    guard: AbstractContextManager[Any] = torch._C._InferenceMode(False)
    return guard


class ThreadState:
    """Modes of torch in the current thread, as they are now.

    Python delivers an interrupt between two instructions, so also inside the `__enter__` or `__exit__` of torch's
    context managers: these then leave behind what they had set, and no `with` statement undoes it.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._collects = gc.isenabled()
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._dispatch, self._functions = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        self._flags = {name: vars(python_dispatch)[name] for name in _FLAGS if name in vars(python_dispatch)}
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Set the modes as they were. Modes that were entered since and are still open end here."""
        while torch._C._len_torch_dispatch_stack() > self._dispatch:
            python_dispatch._pop_mode()
        while torch._C._len_torch_function_stack() > self._functions:
            torch._C._pop_torch_function_stack()
        vars(python_dispatch).update(self._flags)
        if (tell_compiler := vars(python_dispatch).get("set_is_in_mode_without_ignore_compile_internals")) is not None:
            tell_compiler(self._flags[_FLAGS[-1]])
        for kind, casts, dtype in self._casts:
            torch.set_autocast_enabled(kind, casts)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches_casts)
        torch._C._set_grad_enabled(self._grad)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        if self._collects:
            gc.enable()
