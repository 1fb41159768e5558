"""Functions that number relative positions, for `RelativePositionBias`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.errors import SpecError


@dataclass(frozen=True)
class T5Buckets:
    """Buckets of relative positions of T5: one for each short distance, logarithmically wider ones up to a maximum.

    Attributes:
        buckets: Number of buckets.
        max_distance: Distance from which on all positions share the last bucket.
        causal: If True, keys after the query share the bucket of the query's own position, as in decoders.

    Raises:
        SpecError: `buckets` is below 4 (2 if causal), or `max_distance` is not above the distances with their own
            bucket.

    Source: "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.1
    (https://arxiv.org/abs/1910.10683); numbers and rounding as in `T5Attention._relative_position_bucket` of
    transformers.
    """

    buckets: int = 32
    max_distance: int = 128
    causal: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self._exact < 1 or self.max_distance <= self._exact:
            raise SpecError(
                f"{self!r}: expected at least {2 if self.causal else 4} buckets, and max_distance above "
                f"{self._exact}, the number of distances with their own bucket"
            )

    @property
    def _exact(self) -> int:
        """Number of distances with a bucket of their own."""
        return self._per_side // 2

    @property
    def _per_side(self) -> int:
        """Number of buckets of each direction."""
        return self.buckets if self.causal else self.buckets // 2

    def __call__(self, offset: Tensor) -> Tensor:
        """Return the bucket of each offset, key minus query."""
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        # The order of these operations decides how bounds between buckets are rounded.
        far = torch.log(distance.clamp(min=1).float() / self._exact) / math.log(self.max_distance / self._exact)
        wide = self._exact + (far * (self._per_side - self._exact)).long()
        bucket = torch.where(distance < self._exact, distance, wide.clamp(max=self._per_side - 1))
        return bucket if self.causal else bucket + (offset > 0) * self._per_side


@dataclass(frozen=True)
class GridOffsets:
    """Rows of a table with an entry for each offset in a grid, as in Swin and BEiT: for `axes=("h", "w")`.

    The table has `(2 * height - 1) * (2 * width - 1)` entries: the first for a key `height - 1` below and `width - 1`
    to the right of the query, the second for one a step further left.

    Attributes:
        height: Height of the largest grid.
        width: Width of the largest grid.

    Raises:
        SpecError: `height` or `width` is below 1.

    Source: "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", section 3.2
    (https://arxiv.org/abs/2103.14030), numbered as in `SwinRelativePositionBias` of transformers.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        check_at_least(self, 1, "height", "width")

    def __call__(self, down: Tensor, right: Tensor) -> Tensor:
        """Return the row of the table for each offset, key minus query; -1 for offsets that no such grid has."""
        inside = (down.abs() < self.height) & (right.abs() < self.width)
        row = (self.height - 1 - down) * (2 * self.width - 1) + self.width - 1 - right
        return torch.where(inside, row, -1)
