"""The mode of a module: the state that its graphs hold for, and the backend that captures it."""

import os
from collections.abc import Hashable
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.cuda import CudaCapture
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.tape import TapeCapture
from varlen_graphs.errors import SpecError, warn

BackendName = Literal["auto", "cuda", "tape", "eager"]

NO_GRAPHS = "no CUDA graphs here"

IDLE_HOOKS = "transformers.utils.output_capturing"
"""Transformers leaves hooks from here on its modules. They do nothing unless asked to record outputs."""

SHARDING_HOOKS = "torch.distributed.tensor."
"""`parallelize_module` registers hooks from here: they are part of what the module computes."""

INERT = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict,
    nn.ModuleList, nn.RMSNorm, nn.ReLU, nn.Sequential, nn.SiLU,
}  # fmt: skip
"""Most modules of a tower: they do the same in training and evaluation."""

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes that peft changes on a layer without replacing anything."""

_TRAINING = itemgetter("training")


class Mode:
    """Training mode, autocast and hooks of a module, and the backend that captures it.

    Graphs hold for the state at construction; a call in another state runs eager.

    Args:
        module: The module.
        backend: Name of the backend.
        pool: The pool to capture into.
    """

    def __init__(self, module: nn.Module, backend: BackendName, pool: Pool) -> None:
        self._module = module
        self._name: BackendName = backend
        self._pool = pool
        self._backends: dict[torch.device, Backend | None] = {}
        self._adapted: list[dict[str, Any]] | None = None
        self._modules = [m for m in module.modules() if m is module or type(m) not in INERT]
        self._flags = [vars(m) for m in self._modules if "training" in vars(m)]
        self._scripts = [m for m in self._modules if "training" not in vars(m)]
        self._training = self._training_now()
        self._any_training = any(self._training)
        self._autocast = {device_type: autocast_dtype(device_type) for device_type in ("cpu", "cuda")}
        self.look_again()

    def why_eager(self, device: torch.device) -> str | None:
        """Return the reason why no graph can answer a call made now with rows on a device, or `None`."""
        if RemovableHandle.next_id != self._hooks_seen and self.has_hooks():
            return "forward hooks"
        return self.change(device.type) or (None if self.backend(device) is not None else NO_GRAPHS)

    def change(self, device_type: str) -> str | None:
        """Return the difference from the state at construction, or `None`."""
        if os.environ.get("VARLEN_GRAPHS_DISABLE") == "1":
            return "VARLEN_GRAPHS_DISABLE=1"
        if self._training_changed():
            return "training mode differs from construction"
        if autocast_dtype(device_type) != self._autocast.get(device_type):
            return "autocast differs from construction"
        return None

    def backend(self, device: torch.device) -> Backend | None:
        """Return the backend for a device; `None`, with one warning if it was not asked for, where calls run eager.

        Raises:
            SpecError: The backend does not exist on this device, or the pool is in use on another one.
        """
        if device not in self._backends:
            self._backends[device] = self._choose(device)
        return self._backends[device]

    def _choose(self, device: torch.device) -> Backend | None:
        on_cuda = device.type == "cuda" and torch.version.hip is None
        if self._name == "eager":
            return None
        if self._name == "auto" and not on_cuda:
            if not self._backends:
                warn(
                    f"{type(self._module).__name__} is on {device}, where there are no CUDA graphs: calls run eager. "
                    "Pass backend='tape' to replay on the CPU what a graph would, or backend='eager' to say so."
                )
            return None
        if (self._name == "tape" and device.type != "cpu") or (self._name == "cuda" and not on_cuda):
            raise SpecError(
                f"backend={self._name!r} with a module on {device}: expected 'cuda' on CUDA, 'tape' on the CPU"
            )
        self._pool.bind(device)
        return TapeCapture() if self._name == "tape" else CudaCapture(self._pool)

    def adapters(self) -> Hashable:
        """Return the active adapters and their settings, a part of the key of graphs. Peft has them on each layer."""
        if self._adapted is None:
            self._adapted = [vars(m) for m in self._module.modules() if "merged_adapters" in vars(m)]
        if not self._adapted:
            return ()
        return tuple([tuple([repr(own.get(name)) for name in ADAPTERS]) for own in self._adapted])

    def look_again(self) -> None:
        """Find hooks and adapters of submodules that were added or removed since the last capture."""
        self._adapted = None
        self._hooks = [hooks for m in self._module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._hooks_seen = -1

    def warn_of_training(self) -> None:
        """Warn if a graph would hold the module with active dropout."""
        drops = [m for m in self._modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0]
        if drops:
            warn(f"the module is captured in training mode with {len(drops)} active dropouts; call module.eval() first")

    def has_hooks(self) -> bool:
        """Return True if a forward hook would see this call, which no replay runs."""
        registered = RemovableHandle.next_id  # counts the hooks of the process, so most calls need not look
        if registered == self._hooks_seen:
            return False
        if any(_acts(hook) for hooks in filter(None, self._hooks) for hook in hooks.values()):
            return True
        self._hooks_seen = registered
        return False

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return autocast as it was at construction. Casts are not cached: a graph would keep the cached weights."""
        dtype = self._autocast.get(device_type)
        return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)

    def _training_changed(self) -> bool:
        if not self._any_training and not self._scripts:  # nearly always: a module in evaluation
            return any(map(_TRAINING, self._flags))
        return self._training_now() != self._training

    def _training_now(self) -> list[bool]:
        flags = [*map(_TRAINING, self._flags)]
        return [*flags, *[script.training for script in self._scripts]] if self._scripts else flags


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast in this thread; `None` if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _acts(hook: Any) -> bool:
    defined_in = str(getattr(hook, "__module__", None))
    return defined_in != IDLE_HOOKS and not defined_in.startswith(SHARDING_HOOKS)
