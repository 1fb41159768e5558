"""Torch function mode under which a padded batch of clips runs in a graph, each clip as if it were alone."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varlen_graphs.layout.padded import real_rows

MASK_FILES = ("masking_utils.py", "modeling_attn_mask_utils.py")
"""Files of transformers that ask on the host whether a mask may be left out."""

PADDING = 4
"""Place of the padding among the arguments of a convolution."""


@dataclass(frozen=True)
class FrameCount:
    """Number of frames that convolutions make of the rows of a clip: `(rows + offset) // stride`, at least 0."""

    stride: int
    offset: int

    def __call__(self, rows: int) -> int:
        """Return the number of frames."""
        return max(0, (rows + self.offset) // self.stride)

    def of(self, rows: Tensor) -> Tensor:
        """Return the numbers of frames of several clips, int64 `[clips]`. Part of the graph."""
        return ((rows + self.offset) // self.stride).clamp(min=0)


class Alone(TorchFunctionMode):
    """Function mode of the forward of a speech encoder.

    Transformers leaves out masks that mask nothing, which takes a look on the host; here it is told to keep them. With
    `counts`, padded convolutions see zeros past the end of each clip, and group norms see its frames alone.

    Args:
        rows: Number of rows of each clip, int64 `[clips]`.
        counts: Number of frames of a clip before each convolution with padding and each group norm, in their order.

    Attributes:
        frames: Size of the time dimension before each of these.
    """

    def __init__(self, rows: Tensor | None = None, counts: Sequence[FrameCount] | None = None) -> None:
        super().__init__()
        self._rows = rows
        self._counts = counts
        self.frames: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        kwargs = kwargs or {}
        if func in (Tensor.all, torch.all) and sys._getframe(1).f_code.co_filename.endswith(MASK_FILES):
            return False
        is_norm = func is F.group_norm
        if not is_norm and not (func in (torch.conv1d, torch.conv2d) and _pads(args, kwargs)):
            return func(*args, **kwargs)
        x, *others = args
        at = len(self.frames)
        self.frames.append(x.shape[2])
        if self._counts is None or self._rows is None:
            return func(*args, **kwargs)
        real = real_rows(self._counts[at].of(self._rows), x.shape[2])
        real = real.view(len(x), 1, -1, *[1] * (x.dim() - 3))
        return _group_norm(x, real, *others, **kwargs) if is_norm else func(x.masked_fill(~real, 0), *others, **kwargs)


def keeps_masks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tower, with the arguments of its own forward, that runs it with all of its masks."""

    def function(tower: nn.Module, **arguments: Any) -> Any:
        with Alone():
            return tower(**arguments)

    own = inspect.signature(forward).parameters.values()
    tower = inspect.Parameter("tower", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([tower, *own])  # type: ignore[attr-defined]
    return function


def _pads(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    padding = args[PADDING] if len(args) > PADDING else kwargs.get("padding", 0)
    return padding not in (0, (0,), (0, 0), "valid")


def _group_norm(
    x: Tensor, real: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the group norm of `[clips, channels, frames, ...]` over the frames that `real`, bool, marks."""
    by_group = x.float().unflatten(1, (groups, -1))
    dims = tuple(range(2, by_group.dim()))
    real = real[:, None]
    count = real.expand_as(by_group[:, :1]).sum(dims, keepdim=True).clamp(min=1)
    mean = by_group.masked_fill(~real, 0).sum(dims, keepdim=True) / count
    centred = (by_group - mean).masked_fill(~real, 0)
    scale = (centred.square().sum(dims, keepdim=True) / count + eps).rsqrt()
    normed = (centred * scale).flatten(1, 2)
    affine = (1, -1, *[1] * (x.dim() - 2))
    normed = normed if weight is None else normed * weight.view(affine)
    shifted: Tensor = normed if bias is None else normed + bias.view(affine)
    return shifted.to(x.dtype)
