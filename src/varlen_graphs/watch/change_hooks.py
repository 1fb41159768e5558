"""Process-wide hooks that count registrations on modules and resizes of storages.

They are installed when this is imported, and code that `torch.compile` traces passes by them: it would be guarded on
what they are and read, so that a later change would make models of the process compile again.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn


class ChangeCounter:
    """Number of registrations on modules and of resizes of the storages of tensors, which the caller keeps alive."""

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> None:
        self.count = 0
        self._held = [*modules]  # so that their ids stay unique
        self._modules = frozenset(map(id, self._held))
        self._storages = frozenset(filter(None, map(_storage_key, tensors)))

    def on_registration(self, module: nn.Module) -> None:
        """Count a parameter, buffer or submodule that is set on a module."""
        if id(module) in self._modules:
            self.count += 1

    def on_resize(self, storage: int | None) -> None:
        """Count a storage that is resized."""
        if storage in self._storages:
            self.count += 1


class _ChangeHooks:
    """Notifies counters of registrations and resizes, for as long as they are alive."""

    # Torch has hooks for parameters, buffers and submodules, but none for `UntypedStorage.resize_`, by which sharding
    # frees the memory of weights, nor for `Tensor.resize_`: these are wrapped.
    def __init__(self) -> None:
        self._counters: tuple[weakref.ref[ChangeCounter], ...] = ()
        self._lock = threading.Lock()
        torch_module.register_module_parameter_registration_hook(self._on_registration)
        torch_module.register_module_buffer_registration_hook(self._on_registration)
        torch_module.register_module_module_registration_hook(self._on_registration)
        torch.UntypedStorage.resize_ = self._wrap(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        torch.Tensor.resize_ = self._wrap(torch.Tensor.resize_)  # type: ignore[method-assign]
        torch.Tensor.resize_as_ = self._wrap(torch.Tensor.resize_as_)  # type: ignore[method-assign]

    def add(self, counter: ChangeCounter) -> None:
        """Notify a counter from now on."""
        with self._lock:
            self._counters = (*(held for held in self._counters if held() is not None), weakref.ref(counter))

    def _on_registration(self, module: nn.Module, *registered: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        for reference in self._counters:
            if (counter := reference()) is not None:
                counter.on_registration(module)

    def _wrap(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def wrapped(resized: Any, *args: Any, **kwargs: Any) -> Any:
            for reference in () if torch.compiler.is_dynamo_compiling() else self._counters:
                if (counter := reference()) is not None:
                    counter.on_resize(_storage_key(resized))
            return resize(resized, *args, **kwargs)

        return wrapped


_HOOKS = _ChangeHooks()


def count_changes(modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> ChangeCounter:
    """Return a counter of the changes to modules and to the storages of tensors from now on."""
    counter = ChangeCounter(modules, tensors)
    _HOOKS.add(counter)
    return counter


def _storage_key(value: Any) -> int | None:
    """Return a key that is unique among live storages, of a tensor or a storage; `None` if it has none."""
    try:
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()
    except (AttributeError, RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return None
    return int(storage._cdata)
