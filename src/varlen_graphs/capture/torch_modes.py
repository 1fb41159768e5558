"""Modes and transforms of torch, which see each operation of this thread, and would see none of a replay."""

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

DISPATCH_MODE = "a dispatch mode of torch"
FUNCTION_MODE = "a function mode of torch"
TRANSFORM = "a transform of torch.func"
FORWARD_AD = "forward-mode differentiation"
TRACING = "torch.jit.trace"
CACHED = "torch.nn.utils.parametrize.cached"


def active_mode() -> str | None:
    """Return the mode or transform that is active in this thread, or `None`. A default device is none."""
    if torch._C._len_torch_dispatch_stack():
        return DISPATCH_MODE
    if torch._C._len_torch_function_stack():
        modes = map(type, _get_current_function_mode_stack())
        if any(mode is not DeviceContext for mode in modes):
            return FUNCTION_MODE
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return TRANSFORM
    if torch._C._get_tracing_state() is not None:
        return TRACING
    if parametrize._cache_enabled:
        return CACHED
    return FORWARD_AD if forward_ad._current_level >= 0 else None
