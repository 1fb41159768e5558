"""What is fixed when an encoder is made, and how a call can differ from it."""

import os
from collections.abc import Hashable
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from varlen_graphs.errors import warn

IDLE_HOOKS = "transformers.utils.output_capturing"
"""Transformers leaves hooks from here on its modules for good. They do nothing unless asked to record outputs."""

SHARDING_HOOKS = "torch.distributed.tensor."
"""`parallelize_module` puts hooks from here on submodules: these are part of what the module computes."""

INERT = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict,
    nn.ModuleList, nn.RMSNorm, nn.ReLU, nn.Sequential, nn.SiLU,
}  # fmt: skip
"""Most modules of a tower, which do the same in training: nothing depends on their mode."""

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""What peft switches on a layer without replacing anything."""

_TRAINING = itemgetter("training")


class State:
    """Training mode, autocast and hooks of a module: graphs hold for the state at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._adapted: list[dict[str, Any]] | None = None
        self._modules = [m for m in module.modules() if m is module or type(m) not in INERT]
        self._flags = [vars(m) for m in self._modules if "training" in vars(m)]
        self._scripts = [m for m in self._modules if "training" not in vars(m)]
        self._training = self._training_now()
        self._autocast = {device_type: autocast_dtype(device_type) for device_type in ("cpu", "cuda")}
        self.look_anew()

    def why_eager(self, device_type: str) -> str | None:
        """Why no graph can answer a call made now, if so."""
        return "forward hooks" if self.has_hooks() else self.change(device_type)

    def change(self, device_type: str) -> str | None:
        """Why graphs do not hold for a call made now, if they do not."""
        if os.environ.get("VARLEN_GRAPHS_DISABLE") == "1":
            return "VARLEN_GRAPHS_DISABLE=1"
        if self._training_now() != self._training:
            return "training mode differs from construction"
        if autocast_dtype(device_type) != self._autocast.get(device_type):
            return "autocast differs from construction"
        return None

    def adapters(self) -> Hashable:
        """Which adapters are at work, and how: something to keep graphs by. Peft keeps it on each layer it adapts."""
        if self._adapted is None:
            self._adapted = [vars(m) for m in self._module.modules() if "merged_adapters" in vars(m)]
        return tuple(
            [tuple([repr(own.get(name)) for name in ADAPTERS]) for own in self._adapted] if self._adapted else ()
        )

    def look_anew(self) -> None:
        """Find hooks and adapters of submodules that may have come since the last capture, or gone."""
        self._adapted = None
        self._hooks = [hooks for m in self._module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._hooks_seen = -1

    def _training_now(self) -> list[bool]:
        return [*map(_TRAINING, self._flags), *(script.training for script in self._scripts)]

    def warn_of_training(self) -> None:
        """Warn if a graph would hold the module with dropout at work."""
        drops = [m for m in self._modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0]
        if drops:
            warn(
                f"the module is captured in training mode, with {len(drops)} dropouts at work; call module.eval() first"
            )

    def has_hooks(self) -> bool:
        """Whether a forward hook would see this call, which no replay runs."""
        registered = RemovableHandle.next_id  # counts the hooks of the process, so most calls need not look
        if registered == self._hooks_seen:
            return False
        if any(_acts(hook) for hooks in filter(None, self._hooks) for hook in hooks.values()):
            return True
        self._hooks_seen = registered
        return False

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast as it was at construction. Casts are not cached: a graph would keep the cached weights."""
        dtype = self._autocast.get(device_type)
        return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast in this thread; `None` where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _acts(hook: Any) -> bool:
    defined_in = str(getattr(hook, "__module__", None))
    return defined_in != IDLE_HOOKS and not defined_in.startswith(SHARDING_HOOKS)
