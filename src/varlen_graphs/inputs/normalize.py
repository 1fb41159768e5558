"""Normalisation of integer pixels inside the graph."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.shadows.constants import DeviceConstants


@dataclass(frozen=True)
class Normalize:
    """Normalisation of integer pixels: `(pixels * rescale - mean) / std` for each channel.

    Computed inside the graph, in float32. Rows of bytes, as processors return them with `do_rescale=False,
    do_normalize=False` and `.to(torch.uint8)`, take a quarter of the bandwidth of float32 rows to upload and copy.

    Attributes:
        mean: Mean of each channel, `image_mean` of a Hugging Face processor.
        std: Standard deviation of each channel, `image_std` of a processor.
        rescale: Factor applied to pixels first, `rescale_factor` of a processor.
        processor: Image processor that resizes images for `encoder.from_images`.
        constants: Scale and shift of each channel, float32 `[2, channels, 1]`, with one cached copy per device.

    Raises:
        SpecError: `mean` and `std` are not numbers, differ in length or are empty, a number is not finite, or a
            deviation is 0.
    """

    mean: Sequence[float]
    std: Sequence[float]
    rescale: float = 1 / 255
    processor: object = field(default=None, repr=False, compare=False)
    constants: DeviceConstants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            for name in ("mean", "std"):
                object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
            finite = all(map(math.isfinite, (*self.mean, *self.std, self.rescale)))
            object.__setattr__(self, "rescale", float(self.rescale))  # torch takes no larger integers
        except (TypeError, ValueError, OverflowError):
            raise SpecError(
                f"{quoted(self)}: expected a mean and a deviation per channel, such as (0.5, 0.5, 0.5), and one number "
                "as rescale"
            ) from None
        if len(self.mean) != len(self.std) or not self.mean or 0 in self.std or not finite:
            raise SpecError(
                f"{self!r}: expected as many means as deviations, one per channel, all finite and no deviation of 0"
            )
        if not self._compute().isfinite().all():
            raise SpecError(f"{self!r}: expected numbers whose quotients are finite in float32")
        object.__setattr__(self, "constants", DeviceConstants(self._compute))

    @classmethod
    def of(cls, processor: Any) -> "Normalize":
        """Return the normalisation of an image processor of transformers, which also resizes; of a copy of it.

        Raises:
            SpecError: It is no processor of images that rescales and normalises.
        """
        processor = getattr(processor, "image_processor", processor)
        try:
            if not (processor.do_rescale and processor.do_normalize):
                raise SpecError(f"{type(processor).__name__} does not rescale and normalise: expected one that does")
            if "pixel_values" not in processor.model_input_names:
                raise SpecError(
                    f"{type(processor).__name__} makes {processor.model_input_names}: expected pixel_values"
                )
            return cls(processor.image_mean, processor.image_std, processor.rescale_factor, copy.deepcopy(processor))
        except AttributeError as error:
            raise SpecError(f"{type(processor).__name__}: {error}; expected an image processor") from None

    def check(self, shape: Sequence[int] | None) -> None:
        """Check that rows of this shape are pictures, `[..., channels, height, width]`, or channel after channel."""
        channels = len(self.mean)
        if not shape or (shape[0] % channels if len(shape) < 3 else shape[-3] != channels):
            raise SpecError(
                f"rows of shape {shape} cannot be normalised by {counted(channels, 'channel')}: expected pictures "
                f"[..., {channels}, height, width], or a shape whose first size is a multiple of that, channel after "
                "channel"
            )

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise rows `[rows, channels * n, ...]` or `[rows, ..., channels, height, width]`, and cast to `dtype`.

        Three launches.
        """
        scale, shift = self.constants.on(rows.device)
        if rows.dim() > 3:
            channels = rearrange(rows.float(), "... channels h w -> (...) channels (h w)")
        else:
            channels = rearrange(
                rows.float(), "rows (channels n) ... -> rows channels (n ...)", channels=len(self.mean)
            )
        return torch.addcmul(shift, channels, scale).to(dtype).view(rows.shape)

    def _compute(self) -> Tensor:
        """Return the scale and the shift of pixels, float32 `[2, channels, 1]`."""
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float32, device="cpu")[..., None]
        return torch.stack([self.rescale / std, -mean / std])
