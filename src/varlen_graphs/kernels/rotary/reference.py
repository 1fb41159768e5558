"""Rotation of queries and keys in plain torch operations: the specification."""

import torch
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x * cos + rotate_half(x) * sin` of queries and keys, as the public `apply_rotary`, for any strides."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (wide * cos[:, None].float() + rotated * sin[:, None].float()).to(x.dtype).contiguous()
