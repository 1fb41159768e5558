"""Rotation of queries and keys in plain torch operations: the specification."""

import torch
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the head dimension of queries and keys: `x * cos + rotate_half(x) * sin`, in float32.

    Args:
        q: Queries, `[rows, heads, head_dim]`, any float dtype, any strides; `head_dim` even.
        k: Keys, `[rows, heads_k, head_dim]`.
        cos: `[rows, head_dim]`, any float dtype.
        sin: `[rows, head_dim]`.

    Returns:
        Rotated `q` and `k`, contiguous, each in its own dtype.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (wide * cos[:, None].float() + rotated * sin[:, None].float()).to(x.dtype).contiguous()
