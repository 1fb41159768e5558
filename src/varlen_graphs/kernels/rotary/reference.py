"""Rotary position embedding in plain torch operations: the specification."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_table(positions: Sequence[Tensor], inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, laid out for `apply_rotary`.

    Each axis turns its own share of the head: the frequencies of all axes stand side by side, and that half is
    repeated (for `h, w`: `[fh, fw, fh, fw]`).

    Args:
        positions: One integer tensor `[rows]` an axis.
        inv_freq: `[frequencies]`, any float dtype; the arithmetic is float32.

    Returns:
        `cos` and `sin`, float32 `[rows, 2 * axes * frequencies]` each.

    Source: RoFormer (arXiv 2104.09864), per axis as in Qwen2-VL.
    """
    angles = torch.cat([position[:, None].float() * inv_freq.float() for position in positions], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the head dimension of queries and keys: `x * cos + rotate_half(x) * sin`, in float32.

    Args:
        q: Queries, `[rows, heads, head_dim]`, any float dtype, any strides; `head_dim` even.
        k: Keys, `[rows, heads_k, head_dim]`.
        cos: `[rows, head_dim]`, any float dtype.
        sin: `[rows, head_dim]`.

    Returns:
        `q` and `k`, rotated: contiguous, in their own dtype.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (wide * cos[:, None].float() + rotated * sin[:, None].float()).to(x.dtype)
