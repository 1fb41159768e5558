"""Torch function mode under which a padded batch of clips runs in a graph, each clip as if it were alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.recipes.modes.skip_mask_checks import is_mask_check

CONVOLUTIONS = (torch.conv1d, torch.conv2d)

POOLS = (torch.max_pool1d, F.max_pool1d)
"""Functions by which transformers pools masks of frames."""

PADDING = 4
"""Place of the padding among the arguments of a convolution."""


@dataclass(frozen=True)
class FrameCount:
    """Number of frames that convolutions make of the rows of a clip: `(rows + offset) // stride`, at least 0.

    A clip of fewer rows than `least` has none.
    """

    stride: int
    offset: int
    least: int = 0

    def __call__(self, rows: int) -> int:
        """Return the number of frames."""
        return 0 if rows < self.least else max(0, (rows + self.offset) // self.stride)

    def of(self, rows: Tensor) -> Tensor:
        """Return the numbers of frames of several clips, int64 `[clips]`. Part of the graph."""
        frames = ((rows + self.offset) // self.stride).clamp(min=0)
        return frames * (rows >= self.least) if self.least else frames


class MaskedConv(TorchFunctionMode):
    """Function mode of the forward of a speech encoder.

    What transformers asks about masks on the host gets the answer no, as under `SkipMaskChecks`. With `counts`, padded
    convolutions see zeros past the end of each clip, and group norms see its frames alone. With `keys`, so does
    attention, be it over all frames or in blocks of frames. With `pools`, a mask that is pooled marks a piece of it
    only if all frames of the piece are real: a clip alone has no other pieces.

    Args:
        rows: Number of rows of each clip, int64 `[clips]`.
        counts: Number of frames of a clip before each convolution with padding and each group norm, in their order.
        keys: Number of frames of a clip in each attention; `None` leaves attention as it is.
        pools: True if a mask may be pooled.

    Attributes:
        frames: Size of the time dimension before each convolution and norm of `counts`.
        piece: Frames that a pooled mask had for each piece; 1 if none was pooled.
    """

    def __init__(
        self, rows: Tensor | None = None, counts: Sequence[FrameCount] = (), keys: FrameCount | None = None,
        pools: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._rows = rows
        self._counts = counts
        self._keys = keys
        self._pools = pools
        self.frames: list[int] = []
        self.piece = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        kwargs = kwargs or {}
        if is_mask_check(func):
            return False
        if func is F.scaled_dot_product_attention and self._rows is not None and self._keys is not None:
            return _attention(self._rows, self._keys, *args, **kwargs)
        if self._pools and func in POOLS:
            mask, kernel, *others = args if len(args) > 1 else (args[0], kwargs.pop("kernel_size"))
            self.piece = kernel if isinstance(kernel, int) else kernel[0]
            return -func(-mask, kernel, *others, **kwargs)
        if not (func is F.group_norm or (func in CONVOLUTIONS and _pads(args, kwargs)) or _pads_time(func, args)):
            return func(*args, **kwargs)
        x, *others = args
        at = len(self.frames)
        self.frames.append(x.shape[2])
        if self._rows is None:
            return func(*args, **kwargs)
        if len(x) != len(self._rows):
            raise SpecError(
                f"its convolution no. {at} sees {len(x)} blocks of {len(self._rows)} clips of {x.shape[2]} frames: "
                "expected whole clips; pass budgets of shorter clips"
            )
        real = real_rows(self._counts[at].of(self._rows), x.shape[2]).view(len(x), 1, -1, *[1] * (x.dim() - 3))
        if func is F.group_norm:
            return _group_norm(x, real, *others, **kwargs)
        return func(x.masked_fill(~real, 0), *others, **kwargs)


def _pads(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    padding = args[PADDING] if len(args) > PADDING else kwargs.get("padding", 0)
    return padding not in (0, (0,), (0, 0), "valid")


def _pads_time(func: Any, args: Sequence[Any]) -> bool:
    """Return True if a function pads the frames of `[clips, channels, frames]`, for a convolution without padding."""
    return func is F.pad and args[0].dim() == 3 and len(args) > 1 and len(args[1]) == 2


def _attention(
    rows: Tensor, count: FrameCount, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return attention `[clips or their blocks, heads, frames, dim]` in which no query sees a key past the end."""
    frames = len(key) // len(rows) * key.shape[2]
    real = real_rows(count.of(rows), frames).view(len(key), 1, 1, -1)
    least = torch.finfo(query.dtype).min  # unlike -inf, it leaves no NaN in a block without real keys
    if attn_mask is None:
        scores = torch.zeros_like(real, dtype=query.dtype)
    elif attn_mask.dtype == torch.bool:
        scores = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, least)
    else:
        scores = attn_mask
    return F.scaled_dot_product_attention(query, key, value, scores.masked_fill(~real, least), *args, **kwargs)


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
