"""Images as bytes, cut into patches and normalised inside the graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.resize import Resizing
from varlen_graphs.kernels.patches.op import patches
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.shadows.constants import DeviceConstants


@dataclass(frozen=True)
class Patches:
    """Rows are the bytes of images as decoders return them; the graph cuts them into patches and normalises these.

    An item is one image, or `t` of them, uint8 `[t, h * size, w * size, channels]` each; viewed as rows of
    `size * size * channels` bytes it takes `t * h * w` rows, as many as it has patches. The module receives patches as
    Hugging Face processors of Qwen-VL towers return them, `[rows, channels * frames * size * size]` in merge-block
    order, in the dtype of its first floating matrix. A call copies a quarter of the bytes of bfloat16 patches of
    two frames, an eighth of float32 ones. One launch. For `GridTHW`.

    Attributes:
        normalize: Normalisation of each channel; its processor resizes images for `encoder.from_images`, as Qwen2-VL's
            of transformers 5.23.
        size: Height and width of a patch, `patch_size` of a processor.
        frames: Frames of a temporal patch, `temporal_patch_size`: each image is repeated to make them, so a video whose
            frames differ must come as patches.
        constants: Factor and summand of each channel, float32 `[2, channels]`, with one cached copy per device.
        resizing: Resizes images as the processor does.

    Raises:
        SpecError: `size` or `frames` is below 1, or `normalize` is no `Normalize`.
    """

    normalize: Normalize
    size: int
    frames: int = 2
    constants: DeviceConstants = field(init=False, repr=False, compare=False)
    resizing: Resizing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "size", "frames")
        object.__setattr__(self, "constants", DeviceConstants(self._compute))
        object.__setattr__(self, "resizing", Resizing(self.processor, self.frames))

    @classmethod
    def of(cls, processor: Any) -> "Patches":
        """Return the patches that an image processor of transformers makes, with its normalisation.

        Raises:
            SpecError: The processor has no `patch_size`, or as for `Normalize.of`.
        """
        processor = getattr(processor, "image_processor", processor)
        try:
            frames = getattr(processor, "temporal_patch_size", 1)
            return cls(Normalize.of(processor), processor.patch_size, frames)
        except AttributeError as error:
            raise SpecError(f"{type(processor).__name__}: {error}; expected an image processor of patches") from None

    @property
    def processor(self) -> object:
        """The image processor that resizes, if there is one."""
        return self.normalize.processor

    @property
    def row_shape(self) -> tuple[int]:
        """Shape of a row of bytes."""
        return (self.size**2 * len(self.normalize.mean),)

    @property
    def width(self) -> int:
        """Number of values of a patch."""
        return self.frames * self.row_shape[0]

    def check(self, shape: Sequence[int] | None) -> None:
        """Check that rows of this shape are those of bytes."""
        if shape is None or tuple(shape) != self.row_shape:
            raise SpecError(
                f"rows of shape {shape} are no bytes for patches of {self.size} x {self.size} with "
                f"{counted(len(self.normalize.mean), 'channel')}: expected shape={self.row_shape}"
            )

    def __call__(self, rows: Tensor, table: ItemTable, dtype: torch.dtype) -> Tensor:
        """Return the patches of rows of bytes, `[rows, width]`."""
        constants = self.constants.on(rows.device)
        made: Tensor = patches(table.values, rows, constants, self.size, self.frames, table.layout.merge, dtype)
        return made

    def _compute(self) -> Tensor:
        return self.normalize.constants.on(torch.device("cpu"))[..., 0]
