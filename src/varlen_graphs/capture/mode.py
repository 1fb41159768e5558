"""The mode of a module: the state that its graphs hold for, and the backend that captures it."""

import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from varlen_graphs.capture.ambient import OF_PROCESS, AmbientKey, read_ambient
from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.cuda import CudaCapture
from varlen_graphs.capture.parts import EVALUATION, ModuleParts
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.tape import TapeCapture
from varlen_graphs.capture.torch_modes import watcher
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError, counted, warn
from varlen_graphs.guards.adapters import ADAPTERS, is_adapted

BackendName = Literal["auto", "cuda", "tape", "eager"]

NO_GRAPHS = "no CUDA graphs here"

OBSERVED: ContextVar[bool] = ContextVar("observed", default=False)
"""True while the doctor runs the module around an encoder in this thread: its calls run eager, and capture nothing."""

SWITCH = "VARLEN_GRAPHS_DISABLE"
"""Variable of the environment that disables the library: all calls run eager, and nothing is captured."""

DISABLED = f"{SWITCH}=1"
"""Reason of eager runs while the environment disables the library, however it spells that."""

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
"""Values of such a variable, in any case and with spaces around."""

TRAINING = "the module is trained"
DIAGNOSED = "the module around it is diagnosed"
HOOKS = "forward hooks"
ROWS_NEED_GRAD = "rows require grad"

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Mode:
    """The state that graphs of a module hold for, and the backend that captures it.

    Training mode and autocast are those at construction, settings of the process those at the first capture. A call in
    another state runs eager.

    Args:
        module: The module.
        backend: Name of the backend.
        pool: The pool to capture into.
        others: Callables and objects that run beside the module, by name.

    Attributes:
        parts: The modules whose training mode and hooks count.
        may_train: True if a call in grad mode that graphs could answer may need `why_trained` nevertheless: at first,
            and if the module was in training mode at construction.
    """

    def __init__(self, module: nn.Module, backend: BackendName, pool: Pool, others: Mapping[str, Any]) -> None:
        self._module = module
        self._name: BackendName = backend
        self._pool = pool
        self._backends: dict[torch.device, Backend | None] = {}
        self._others = others
        self._expected: dict[str, bool] = {}  # training mode of each part
        self._grad_seen = False
        self.may_train = True
        self._captured = False
        self._key = AmbientKey(*read_ambient(EVALUATION))
        self.refresh()

    def eager_reason(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """Return the reason why no graph can answer a call made now with these arguments, or `None`."""
        if (by := watcher(args, kwargs)) is not None:
            return by
        parts = self.parts
        if (parts.hooks_seen != RemovableHandle.next_id or parts.hooks_in_grad_mode) and parts.hooked():
            return HOOKS
        return DIAGNOSED if OBSERVED.get() else self.change()

    def change(self) -> str | None:
        """Return the difference between the state now and that of graphs, or `None`."""
        if SWITCH in os.environ and is_disabled():
            return DISABLED
        now = read_ambient(self.parts.training())
        return None if now == self._key else AmbientKey(*now).difference(self._key, of_process=self._captured)

    def why_no_graphs(self, device: torch.device) -> str | None:
        """Return `NO_GRAPHS` where there are none on a device, or `None`; see `backend`."""
        return NO_GRAPHS if self.backend(device) is None else None

    def hold_settings(self) -> None:
        """Hold for the settings of the process as they are now, in which the first graph was captured."""
        self._key = AmbientKey._make((*self._key[:OF_PROCESS], *read_ambient(EVALUATION)[OF_PROCESS:]))
        self._captured = True

    def forget_settings(self) -> None:
        """Hold for any settings of the process, because there are no graphs."""
        self._captured = False

    def why_trained(self, rows_need_grad: bool) -> str | None:
        """Return the reason why a call made in grad mode needs gradients, which no graph has, or `None`.

        Looks at parameters only in training mode, and once besides, because there are many.
        """
        if rows_need_grad:
            return ROWS_NEED_GRAD
        training = bool(self.parts.training())
        if training or not self._grad_seen:
            trainable = any(parameter.requires_grad for parameter in self._module.parameters())
            if trainable and training:
                return TRAINING
            if trainable:
                self._warn_of_no_grad()
        self.may_train = bool(self.parts.expected)
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

    def backend(self, device: torch.device) -> Backend | None:
        """Return the backend for a device; `None`, with one warning if it was not asked for, where calls run eager.

        Raises:
            SpecError: The backend does not exist on this device, or the pool is in use on another one.
        """
        try:
            return self._backends[device]
        except KeyError:
            return self._backends.setdefault(device, self._choose(device))

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
        trained = (bool(self.parts.training()),) if self.parts.expected else ()
        if not self._adapted:
            return trained
        return trained + tuple([tuple([repr(own.get(name)) for name in ADAPTERS]) for own in self._adapted])

    def expect_evaluation(self) -> None:
        """Hold for evaluation mode, whichever mode the parts of the module are in now."""
        self._expected.update({path: False for path, _ in self._module.named_modules()})
        self.refresh()

    def refresh(self) -> None:
        """Find the modules that were added or removed since the last capture, with their hooks and adapters."""
        self.parts = ModuleParts(self._module, self._others, self._expected)
        self._key = self._key._replace(training=self.parts.expected)
        self._adapted = [vars(part) for part in self.parts.modules if is_adapted(part)]

    def warn_of_training(self) -> None:
        """Warn if a graph would hold the module in training mode."""
        if self.parts.training():
            active = sum(part.training and part.p > 0 for part in self.parts.modules if isinstance(part, DROPOUTS))
            what = f" with {counted(active, 'active dropout')}" if active else ""
            warn(f"{type(self._module).__name__} is captured in training mode{what}; call module.eval() first")

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return autocast as it was at construction. Casts are not cached: a graph would keep the cached weights."""
        dtype = {"cpu": self._key.autocast_cpu, "cuda": self._key.autocast_cuda}.get(device_type)
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
