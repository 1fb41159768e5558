"""Cosines and sines of rotary position embedding in plain torch operations: the specification."""

import torch
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates


def rotary_table(
    values: Tensor, rows: int, inv_freq: Tensor, axes: str, merge: int, side: int = 0
) -> tuple[Tensor, Tensor]:
    """Return `cos` and `sin` of the rotation angles for `apply_rotary`, float32 `[rows, 2 * axes * frequencies]`.

    Each axis rotates its own part of the head: the frequencies of all axes are concatenated, and that half is repeated
    (for `h, w`: `[fh, fw, fh, fw]`). Padding rows have position 0: cosines of 1 and sines of 0. If `side` is not 0, the
    blocks of a frame are ordered in windows of `side * side`.

    Source: RoFormer (arXiv 2104.09864), per axis as in Qwen2-VL.
    """
    place = coordinates(values, rows, merge, side)
    positions = [getattr(place, axis) for axis in axes.split()]
    angles = torch.cat([position[:, None].float() * inv_freq.float() for position in positions], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
