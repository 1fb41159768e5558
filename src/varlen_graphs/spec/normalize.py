"""Integer pixels, normalised inside the graph."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.buffers.device_constants import DeviceConstants
from varlen_graphs.errors import SpecError


@dataclass(frozen=True)
class Normalize:
    """Turns integer pixels into what a module takes: `(pixels * rescale - mean) / std`, channel by channel.

    Inside the graph, in float32. Rows of bytes are a quarter of what float32 is to upload and to copy.

    Attributes:
        mean: One number a channel, as processors have it (`image_mean`).
        std: One number a channel (`image_std`).
        rescale: What processors multiply pixels by first.

    Raises:
        SpecError: Not as many means as deviations, or a deviation of 0.
    """

    mean: Sequence[float]
    std: Sequence[float]
    rescale: float = 1 / 255
    _constants: DeviceConstants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        finite = all(map(math.isfinite, (*self.mean, *self.std, self.rescale)))
        if len(self.mean) != len(self.std) or not self.mean or 0 in self.std or not finite:
            raise SpecError(
                f"{self!r}: expected as many means as deviations, one a channel, finite numbers, and no deviation of 0"
            )
        object.__setattr__(self, "_constants", DeviceConstants(self._compute))

    def check(self, shape: Sequence[int] | None) -> None:
        """Whether rows of this shape have whole channels, which come first.

        Raises:
            SpecError: They have not.
        """
        if not shape or shape[0] % len(self.mean):
            raise SpecError(
                f"rows of shape {shape} cannot be normalised by {len(self.mean)} channels: expected a shape whose "
                "first size is a multiple of that, channel after channel"
            )

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[rows, channels * n, ...]`, channel after channel, normalised and cast to `dtype`; three launches."""
        scale, shift = self._constants.on(rows.device)
        channels = rearrange(rows.float(), "rows (channels n) ... -> rows channels (n ...)", channels=len(self.mean))
        return torch.addcmul(shift, channels, scale).to(dtype).view(rows.shape)

    def _compute(self) -> Tensor:
        """What pixels are multiplied by, and what is added: float32 `[2, channels, 1]`."""
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float32, device="cpu")[..., None]
        return torch.stack([self.rescale / std, -mean / std])
