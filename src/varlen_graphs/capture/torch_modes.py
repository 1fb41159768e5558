"""Modes, transforms and tracers, which see each operation of an eager call, but none of a replay."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, has_torch_function
from torch.utils._device import DeviceContext

from varlen_graphs.torch_dispatch.leaves import PLAIN_TENSORS

DISPATCH_MODE = "a dispatch mode of torch"
FUNCTION_MODE = "a function mode of torch"
TRANSFORM = "a transform of torch.func"
FORWARD_AD = "forward-mode differentiation"
TRACING = "torch.jit.trace"
CACHED = "torch.nn.utils.parametrize.cached"
SUBCLASS = "a tensor of a subclass of torch.Tensor"
PROXY = "a proxy of a tensor"

WATCHERS = frozenset({DISPATCH_MODE, FUNCTION_MODE, TRANSFORM, FORWARD_AD, TRACING, CACHED, SUBCLASS, PROXY})
"""Reasons of calls that bring tensors whose values may not be read, or that others will ask for again."""

INSTEAD = "call vg.unwrap(model) first, or take the module itself (encoder.module)"
"""Remedy where only the module itself will do."""

_ORDINARY = frozenset({*PLAIN_TENSORS, list, tuple, range, dict, int, float, bool, str, type(None)})
"""Types of nearly all arguments, which have no torch functions of their own."""

_NO_TENSOR = (None,)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_traced = torch._C._is_tracing  # `torch.jit.is_tracing`, which takes several times as long


def active_mode() -> str | None:
    """Return the mode or transform that is active in this thread, or `None`. A default device is none."""
    if _dispatch_modes():
        return DISPATCH_MODE
    if has_torch_function(_NO_TENSOR):  # of a mode
        modes = map(type, _get_current_function_mode_stack())
        if any(mode is not DeviceContext for mode in modes):
            return FUNCTION_MODE
    if _transforms() is not None:
        return TRANSFORM
    if _traced():
        return TRACING
    if parametrize._cache_enabled:
        return CACHED
    return FORWARD_AD if forward_ad._current_level >= 0 else None


def watcher(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return what follows a call with these arguments beside eager PyTorch, which a replay would escape, or `None`.

    Asked before anything reads an argument: what was read under a tracer is a constant of what it records.
    """
    # As `active_mode`, in one frame: every call runs this.
    if (
        has_torch_function(_NO_TENSOR)
        or _dispatch_modes()
        or _transforms() is not None
        or _traced()
        or parametrize._cache_enabled
        or forward_ad._current_level >= 0
    ) and (mode := active_mode()) is not None:
        return mode
    for value in args:
        if type(value) not in _ORDINARY and (kind := _kind(value)) is not None:
            return kind
    for value in kwargs.values():
        if type(value) not in _ORDINARY and (kind := _kind(value)) is not None:
            return kind
    return None


def _kind(value: Any) -> str | None:
    """Return what an argument is that has torch functions of its own; `None` for all others."""
    if isinstance(value, Tensor):
        return None if type(value) in PLAIN_TENSORS else SUBCLASS
    return PROXY if hasattr(type(value), "__torch_function__") else None


def records(mode: str) -> bool:
    """Return True if what follows the call records its operations, to run them for other calls."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return mode == TRACING or (tracer is not None and tracer.get_proxy_mode() is not None)
