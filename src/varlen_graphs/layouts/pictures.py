"""Padded pictures: `[images, channels, height, width]`, and the arguments that describe their real patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.checks.values import INTEGERS, as_list, is_dense, quoted, size_of, stacked
from varlen_graphs.errors import LayoutError, counted
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.items import Layout


class Pictures(LayoutArgument):
    """Base class of arguments that describe padded pictures, whose real patches are packed on their way in.

    Attributes:
        patch: Side of a patch in pixels.
    """

    patch: int
    columns: tuple[Column, ...] = ()
    optional = True
    packed = True
    has_sides = True
    rows_are = "pictures, each padded at the right and at the bottom to the same size"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check_at_least(self, 1, "patch")

    def check_rows(self, layout: Layout, shape: Sequence[int], rows: str) -> None:
        """Check that the items lie in pictures of this shape, `[images, height, width, ...]` in patches.

        Raises:
            LayoutError: The number of images differs, or an item is larger than the pictures.
        """
        images, height, width = shape[:3]
        if len(layout) != images:
            raise LayoutError(
                f"{self.name} describes {counted(len(layout), 'image')}, but {rows} has {images}: expected an entry "
                "for each"
            )
        for index, (_, h, w, *_) in enumerate(layout.items):
            if h > height or w > width:
                raise LayoutError(
                    f"{self.name}[{index}] describes {h} x {w} patches of {self.patch} pixels, but the pictures in "
                    f"{rows} have {height} x {width}: expected sizes within the pictures"
                )


@dataclass(frozen=True)
class PictureSizes(Pictures):
    """Argument that describes padded pictures by the height and width of each image in pixels.

    Calls bring the rows as `[images, channels, height, width]`, each image in the upper left corner, and the real
    patches of each are packed, line by line, in two copies. A patch that an image only begins to fill does not count.
    The rows are declared as `vg.inputs.Rows(name, (channels, patch, patch))`, the form in which the module receives
    them; it does not get the sizes. Outputs declared as `Rows()` are returned as `[images, patches of the padded
    picture, ...]` with zeros past the image. Budgets count patches.

    Attributes:
        name: Name of the argument. A call may bring a list of pairs, or a tensor `[images, 2]` on the CPU or the GPU. A
            tensor on the GPU costs one copy to the host. Without it, all pixels of the pictures are real.
        patch: Side of a patch in pixels.

    Raises:
        SpecError: `patch` is not an integer of at least 1, or `name` no string.
    """

    name: str
    patch: int

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`, in patches.

        Raises:
            LayoutError: `value` is not integers `[images, 2]`, is empty, or has a side below 0.
        """
        items = []
        for index, entry in enumerate(as_list(self.name, value, "[images, 2] of (height, width)")):
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise LayoutError(f"{self.name}[{index}] is {quoted(entry)}: expected two integers (height, width)")
            h, w = (size_of(f"{self.name}[{index}]", side, entry) // self.patch for side in entry)
            items.append((1, h, w))
        return items

    def missing(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the sizes of pictures without padding."""
        return [(shape[2], shape[3])] * shape[0]

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return the sizes in pixels, int64 `[images, 2]`, from the values of an item table."""
        return values[:, 1:3] * self.patch


@dataclass(frozen=True)
class PictureMask(Pictures):
    """Argument that describes padded pictures by a mask of their patches, `[images, height, width]` in patches.

    The rows, the outputs and the budgets are as for `PictureSizes`. The real patches of each picture fill a rectangle
    in its upper left corner.

    Attributes:
        name: Name of the argument. A call may bring a tensor of bool or of 0 and 1 on the CPU or the GPU, or a sequence
            of them. A tensor on the GPU costs one copy of a few integers to the host. Without it,
            all patches are real.
        patch: Side of a patch in pixels.
        whole: If True, calls with padding run eager, by the original module: for modules whose callers read what they
            return for padding.

    Raises:
        SpecError: `patch` is not an integer of at least 1, or `name` no string.
    """

    name: str
    patch: int
    whole: bool = False

    def eager_reason(self, layout: Layout, padded: tuple[int, ...]) -> str | None:
        """Return why only the original module can answer a call of pictures of this size; `None` if graphs can."""
        partial = self.whole and any(item[1:3] != padded for item in layout.items)
        return f"padding in {self.name}" if partial else None

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`.

        Raises:
            LayoutError: `value` is not a mask `[images, height, width]`, or the real patches of a picture are no
                rectangle in its upper left corner.
        """
        mask = self._tensor(value)
        heights, widths = mask[:, :, 0].sum(1), mask[:, 0].sum(1)
        whole = (mask == real_patches(heights, widths, mask.shape[1:])).flatten(1).all(1)
        items = []
        for index, (h, w, valid) in enumerate(torch.stack([heights, widths, whole], 1).tolist()):
            if not valid:
                raise LayoutError(
                    f"{self.name}[{index}] marks other patches than those of a rectangle in the upper left corner: "
                    "expected an image padded at the right and at the bottom"
                )
            items.append((1, h, w))
        return items

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return 0, because the rows are packed.

        Raises:
            LayoutError: The mask has another size than the pictures.
        """
        size = self._tensor(value).shape[1:]
        if shape and size != tuple(shape[1:3]):
            raise LayoutError(
                f"{self.name} is [{len(items)}, {size[0]}, {size[1]}], but the pictures have {shape[1]} x {shape[2]} "
                f"patches of {self.patch} pixels: expected a mask [images, height, width] in patches"
            )
        return 0

    def missing(self, shape: Sequence[int]) -> Tensor:
        """Return the mask of pictures without padding, bool on the CPU."""
        size = shape[0], shape[2] // self.patch, shape[3] // self.patch
        return torch.ones(size, dtype=torch.bool, device="cpu")

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return the mask, bool `[images, height, width]`, from the values of an item table. Syncs."""
        heights, widths = values[:, 1], values[:, 2]
        return real_patches(heights, widths, (int(heights.max()), int(widths.max())))

    def _tensor(self, value: Any) -> Tensor:
        mask = stacked(self.name, value)
        if not (isinstance(mask, Tensor) and is_dense(mask)) or mask.dim() != 3 or not _marks(mask):
            came = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise LayoutError(
                f"{self.name} is {came}: expected a tensor [images, height, width] of bool, or of 0 and 1, with at "
                "least one image"
            )
        return mask


def _marks(mask: Tensor) -> bool:
    return mask.numel() > 0 and mask.dtype in (torch.bool, *INTEGERS)


def real_patches(heights: Tensor, widths: Tensor, size: Sequence[int]) -> Tensor:
    """Return the real patches of padded pictures of a size in patches, bool `[images, height, width]`."""
    lines = torch.arange(size[0], device=heights.device) < heights[:, None]
    return lines[:, :, None] & (torch.arange(size[1], device=widths.device) < widths[:, None])[:, None]


def patches_of(pictures: Tensor, patch: int) -> Tensor:
    """Return a view of the patches of pictures, `[images, height, width, channels, patch, patch]`.

    Pixels at the right and at the bottom that fill no patch are left out.
    """
    height, width = pictures.shape[2] // patch, pictures.shape[3] // patch
    pixels = pictures[:, :, : height * patch, : width * patch]
    patches: Tensor = rearrange(pixels, "n c (h i) (w j) -> n h w c i j", i=patch, j=patch)
    return patches


def pictures_of(patches: Tensor) -> Tensor:
    """Return the pictures `[images, channels, height, width]` of such patches."""
    pictures: Tensor = rearrange(patches, "n h w c i j -> n c (h i) (w j)")
    return pictures
