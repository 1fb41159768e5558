"""Padded batches of patches, described by the position of each patch in its image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.checks.values import INTEGERS, is_dense, stacked
from varlen_graphs.errors import LayoutError
from varlen_graphs.layouts.arguments import LayoutArgument


@dataclass(frozen=True)
class PatchPositions(LayoutArgument):
    """Argument that describes a padded batch of patches by their `(x, y)` positions, for modules that take packed rows.

    Calls bring the rows as `[batch, length, ...]` and the positions as integers `[batch, length, 2]`: those of each
    image first, line by line from (0, 0), then (-1, -1) in padding. The graph packs the batch, or one launch ahead of
    it if it is not contiguous or of another dtype, and outputs declared as `Rows()` are returned as `[batch, length,
    ...]` with zeros past the end of each image, two launches each. Budgets count packed rows. The module does not get
    the positions: declare `GridPositions(axes=("w", "h"))`.

    Attributes:
        name: Name of the argument. A call may bring a tensor on the CPU or the GPU, or a sequence of them. A tensor on
            the GPU costs one copy of a few integers to the host.
        merge: Side of the square of patches that becomes one token; the sides of images must be divisible by it.

    Raises:
        SpecError: `merge` is not an integer of at least 1, or `name` no string.
    """

    name: str
    merge: int = 1
    columns = ()
    packed = True
    has_sides = True
    rows_are = "a batch of images, the patches of each padded to the same number"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`.

        Raises:
            LayoutError: `value` is not integers `[batch, length, 2]`, positions of an image are not those of its lines
                one after another, or `merge` does not divide a side.
        """
        positions = self._tensor(value).long()
        width, height = (positions.amax(1) + 1).unbind(1)
        length = positions.shape[1]
        valid = (positions == _positions(height, width, length)).flatten(1).all(1) & (height * width <= length)
        items = []
        for index, (h, w, ok) in enumerate(torch.stack([height, width, valid], 1).tolist()):
            if not ok:
                raise LayoutError(
                    f"{self.name}[{index}] has other positions than those of an image: expected (x, y) line by line "
                    "from (0, 0), and then (-1, -1) in padding"
                )
            if h % self.merge or w % self.merge:
                raise LayoutError(
                    f"{self.name}[{index}] has {h} x {w} patches: expected sides divisible by the merge size "
                    f"{self.merge}; resize the image"
                )
            items.append((1, h, w))
        return items

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return 0, because the rows are packed.

        Raises:
            LayoutError: There are positions for another number of patches.
        """
        if shape and self._tensor(value).shape[1] != shape[1]:
            raise LayoutError(
                f"{self.name} has {self._tensor(value).shape[1]} positions for each image, but the rows are "
                f"{list(shape)}: expected [batch, length, 2] for rows [batch, length, ...]"
            )
        return 0

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return the positions, int64 `[batch, length, 2]`, from the values of an item table. Syncs."""
        height, width = values[:, 1], values[:, 2]
        return _positions(height, width, int((height * width).max()))

    def _tensor(self, value: Any) -> Tensor:
        value = stacked(self.name, value)
        is_integral = isinstance(value, Tensor) and is_dense(value) and value.dtype in INTEGERS
        if not is_integral or value.dim() != 3 or value.shape[2] != 2 or value.numel() == 0:
            came = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise LayoutError(f"{self.name} is {came}: expected a tensor of integers [batch, length, 2], not empty")
        positions: Tensor = value
        return positions


def _positions(height: Tensor, width: Tensor, length: int) -> Tensor:
    """Return `(x, y)` of the patches of each image, line by line, int64 `[batch, length, 2]`; -1 past the last one."""
    at = torch.arange(length, device=height.device)
    across = width.clamp(min=1)[:, None]
    positions = torch.stack([at % across, at // across], -1)
    return positions.masked_fill((at >= (height * width)[:, None])[..., None], -1)
