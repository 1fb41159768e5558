"""What is fixed when an encoder is made, and how a call can differ from it."""

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn

IDLE_HOOKS = "transformers.utils.output_capturing"
"""Transformers leaves hooks from here on its modules for good. They do nothing unless asked to record outputs."""


class State:
    """Training mode, autocast and hooks of a module: graphs hold for the state at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._training = [m.training for m in self._modules]
        self._autocast = {device_type: _autocast(device_type) for device_type in ("cpu", "cuda")}
        self._hooks = [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]

    def change(self, device_type: str) -> str | None:
        """Why graphs do not hold for a call made now, if they do not."""
        if os.environ.get("VARLEN_GRAPHS_DISABLE") == "1":
            return "VARLEN_GRAPHS_DISABLE=1"
        if [m.training for m in self._modules] != self._training:
            return "training mode differs from construction"
        if _autocast(device_type) != self._autocast.get(device_type):
            return "autocast differs from construction"
        return None

    def warn_of_training(self) -> None:
        """Warn if a graph would hold the module with dropout at work."""
        drops = [m for m in self._modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0]
        if drops:
            warnings.warn(
                f"the module is captured in training mode, with {len(drops)} dropouts at work; call module.eval() "
                "first",
                stacklevel=6,
            )

    def has_hooks(self) -> bool:
        """Whether a forward hook would see this call, which no replay runs."""
        return any(self._hooks) and any(_acts(hook) for hooks in self._hooks for hook in hooks.values())

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast as it was at construction. Casts are not cached: a graph would keep the cached weights."""
        dtype = self._autocast.get(device_type)
        return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)


def _autocast(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _acts(hook: Any) -> bool:
    return getattr(hook, "__module__", None) != IDLE_HOOKS
