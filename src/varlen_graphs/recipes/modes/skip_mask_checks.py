"""Torch function mode that answers what models of transformers ask about masks and token ids on the host."""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MASK_FILES = ("masking_utils.py", "modeling_attn_mask_utils.py")
"""Files of transformers that ask whether a mask may be left out."""

WARNING = "warn_if_padding_and_no_attention_mask"
"""Function of transformers that asks whether token ids without a mask hold padding."""

_TORCH = str(Path(torch.__file__).parent)


def is_mask_check(func: Any) -> bool:
    """Return True if code of transformers calls a torch function to ask one of these questions.

    Code under `torch.compile`, which cannot tell its caller, asks none.
    """
    if torch.compiler.is_compiling():
        return False
    caller = sys._getframe(2)  # of the mode
    if func in (Tensor.all, torch.all):
        return caller.f_code.co_filename.endswith(MASK_FILES)
    if func is not Tensor.__contains__:
        return False
    frame: FrameType | None = caller  # one of torch's own, which lie between
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == WARNING


class SkipMaskChecks(TorchFunctionMode):
    """Function mode of a forward that says no to these questions, so that the host reads no tensor.

    Masks stay, even those that mask nothing, and nothing is warned of.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        return False if is_mask_check(func) else func(*args, **(kwargs or {}))


def keeps_masks(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tower as `run` is, in which transformers leaves out no masks."""

    def function(tower: nn.Module, **arguments: Any) -> Any:
        with SkipMaskChecks():
            return run(tower, **arguments)

    function.__signature__ = signature(run)  # type: ignore[attr-defined]
    return function
