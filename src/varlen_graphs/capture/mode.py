"""The mode of a module: the state that its graphs hold for, and the backend that captures it."""

import functools
import os
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.cuda import CudaCapture
from varlen_graphs.capture.parts import ModuleParts
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.tape import TapeCapture
from varlen_graphs.errors import SpecError, counted, warn
from varlen_graphs.layout.values import quoted

BackendName = Literal["auto", "cuda", "tape", "eager"]

NO_GRAPHS = "no CUDA graphs here"

OBSERVED: ContextVar[bool] = ContextVar("observed", default=False)
"""True while the doctor runs the module around an encoder in this thread: its calls run eager, and capture nothing."""

IDLE_HOOKS = "transformers.utils.output_capturing"
"""Transformers leaves hooks from here on its modules. They do nothing unless asked to record outputs."""

GRADIENT_HOOK = "enable_input_require_grads.<locals>.make_inputs_require_grads"
"""Transformers leaves this hook on embeddings after gradient checkpointing. It does nothing where there is no grad."""

SHARDING_HOOKS = "torch.distributed.tensor."
"""`parallelize_module` registers hooks from here: they are part of what the module computes."""

OF_ADAPTED = ("_active_adapter", "active_adapter", "_disable_adapters", "merged_adapters")
"""Attributes by which parts that peft adapts are told: layers, parts that it keeps a copy of, models with prompts."""

ADAPTERS = (*OF_ADAPTED, "scaling")
"""Attributes of those parts that peft changes without replacing anything."""

SWITCH = "VARLEN_GRAPHS_DISABLE"
"""Variable of the environment that disables the library: all calls run eager, and nothing is captured."""

DISABLED = f"{SWITCH}=1"
"""Reason of eager runs while the environment disables the library, however it spells that."""

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
"""Values of such a variable, in any case and with spaces around."""

TRAINING = "the module is trained"
DIAGNOSED = "the module around it is diagnosed"
TRAINING_CHANGED = "training mode differs from construction"
ROWS_NEED_GRAD = "rows require grad"


class Mode:
    """Training mode, autocast and hooks of a module, and the backend that captures it.

    Graphs hold for the state at construction; a call in another state runs eager.

    Args:
        module: The module.
        backend: Name of the backend.
        pool: The pool to capture into.
        also: Callables and objects that run beside the module, by name.

    Attributes:
        parts: The modules whose training mode and hooks count.
        default_dtype: The default dtype of torch at the first capture; `None` before.
        may_train: True if a call in grad mode that graphs could answer may need `why_trained` nevertheless: at first,
            and if the module was in training mode at construction.
    """

    def __init__(self, module: nn.Module, backend: BackendName, pool: Pool, also: Mapping[str, Any]) -> None:
        self._module = module
        self._name: BackendName = backend
        self._pool = pool
        self._backends: dict[torch.device, Backend | None] = {}
        self._also = also
        self._expected: dict[str, bool] = {}  # training mode of each part
        self._grad_seen = False
        self.may_train = True
        self._autocast = {device_type: autocast_dtype(device_type) for device_type in ("cpu", "cuda")}
        self.default_dtype: torch.dtype | None = None
        self.look_again()

    def why_eager(self, device: torch.device) -> str | None:
        """Return the reason why no graph can answer a call made now with rows on a device, or `None`.

        What follows the call from outside, `watcher` tells.
        """
        if (RemovableHandle.next_id != self._hooks_seen or self._hooks_ask) and self.has_hooks():
            return "forward hooks"
        if OBSERVED.get():
            return DIAGNOSED
        return self.change(device.type) or (None if self.backend(device) is not None else NO_GRAPHS)

    def why_trained(self, rows_need_grad: bool) -> str | None:
        """Return the reason why a call made in grad mode needs gradients, which no graph has, or `None`.

        Looks at parameters only in training mode, and once besides, because there are many.
        """
        if rows_need_grad:
            return ROWS_NEED_GRAD
        training = self.parts.trains()
        if training or not self._grad_seen:
            trainable = any(parameter.requires_grad for parameter in self._module.parameters())
            if trainable and training:
                return TRAINING
            if trainable:
                self._warn_of_no_grad()
        self.may_train = self.parts.expects_training
        return None

    def _warn_of_no_grad(self) -> None:
        """Warn once that outputs carry no gradient, though a caller might expect one."""
        if not self._grad_seen:
            warn(
                f"{type(self._module).__name__} has parameters that require grad and grad mode is on, but outputs in "
                "evaluation mode carry no gradient: call under torch.no_grad() or torch.inference_mode(), which says "
                "so, or train with module.train()"
            )
        self._grad_seen = True

    def change(self, device_type: str) -> str | None:
        """Return the difference from the state at construction, or `None`."""
        if SWITCH in os.environ and is_disabled():
            return DISABLED
        if self.parts.training_changed():
            return TRAINING_CHANGED
        if autocast_dtype(device_type) != self._autocast.get(device_type):
            return "autocast differs from construction"
        if self.default_dtype is not None and self.default_dtype is not torch.get_default_dtype():
            return "the default dtype differs from the capture"
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
        """Return the active adapters and their settings, a part of the key of graphs. Peft has them on each layer.

        Of a module that is expected in training mode also tells whether it is, because evaluation has its own graphs.
        """
        trained = (self.parts.trains(),) if self.parts.expects_training else ()
        if not self._adapted:
            return trained
        return trained + tuple([tuple([repr(own.get(name)) for name in ADAPTERS]) for own in self._adapted])

    def expect_evaluation(self) -> None:
        """Hold for evaluation mode, whichever mode the parts of the module are in now."""
        self._expected.update({path: False for path, _ in self._module.named_modules()})
        self.look_again()

    def look_again(self) -> None:
        """Find the modules that were added or removed since the last capture, with their hooks and adapters."""
        self.parts = ModuleParts(self._module, self._also, self._expected)
        self._adapted = [vars(part) for part in self.parts.modules if not vars(part).keys().isdisjoint(OF_ADAPTED)]
        self._hooks_seen, self._hooks_ask = -1, False

    def warn_of_training(self) -> None:
        """Warn if a graph would hold the module in training mode."""
        if self.parts.trains():
            drops = [m for m in self.parts.modules if isinstance(m, nn.modules.dropout._DropoutNd)]
            active = sum(drop.training and drop.p > 0 for drop in drops)
            what = f" with {counted(active, 'active dropout')}" if active else ""
            warn(f"{type(self._module).__name__} is captured in training mode{what}; call module.eval() first")

    def has_hooks(self) -> bool:
        """Return True if a forward hook would see this call, which no replay runs."""
        registered = RemovableHandle.next_id  # counts the hooks of the process, so most calls need not look
        if registered != self._hooks_seen:
            acting = [hook for hook in self.parts.hooks() if _acts(hook)]
            if not all(map(_asks_for_gradients, acting)):
                return True
            self._hooks_seen, self._hooks_ask = registered, bool(acting)
        return self._hooks_ask and torch.is_grad_enabled()

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return autocast as it was at construction. Casts are not cached: a graph would keep the cached weights."""
        dtype = self._autocast.get(device_type)
        return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)


def is_disabled() -> bool:
    """Return True if the environment asks that all calls run eager."""
    return _is_on(os.environ.get(SWITCH, ""))


@functools.cache
def _is_on(setting: str) -> bool:
    """Return what the switch is set to; warn, once for each, of a setting that says neither on nor off."""
    value = setting.strip().lower()
    if value not in (*ON, *OFF):
        warn(
            f"{SWITCH}={quoted(setting)}: expected one of {', '.join(ON)} to run all calls eager, or one of "
            f"{', '.join(OFF[:-1])} to run graphs; graphs run"
        )
    return value in ON


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast in this thread; `None` if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _acts(hook: Any) -> bool:
    defined_in = str(getattr(hook, "__module__", None))
    return defined_in != IDLE_HOOKS and not defined_in.startswith(SHARDING_HOOKS)


def _asks_for_gradients(hook: Any) -> bool:
    """Return True for a hook that transformers adds for gradient checkpointing, and leaves there."""
    return str(getattr(hook, "__qualname__", None)).endswith(GRADIENT_HOOK)
