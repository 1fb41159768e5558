"""Resampling of bytes along one axis in plain torch operations: the specification.

Source: Pillow's `Image.resize` of 8-bit channels and `torch.nn.functional.interpolate(antialias=True)` of uint8 on a
CPU. Both weigh pixels by fixed-point numbers, add them up as integers, and round each axis to bytes.
"""

import torch
from torch import Tensor


def resample(pixels: Tensor, filters: Tensor, bits: int) -> Tensor:
    """Resample the second axis of bytes.

    Args:
        pixels: uint8 `[outer, size, inner]`.
        filters: For each position of the result the first pixel and the weights of `taps` pixels from there on, int32
            `[resized, 1 + taps]`. Pixels past the end have a weight of 0.
        bits: Binary places of the weights, which add up to `2 ** bits`.

    Returns:
        uint8 `[outer, resized, inner]`.
    """
    first, weights = filters[:, 0], filters[:, 1:]
    total = torch.full((pixels.shape[0], len(filters), pixels.shape[2]), 1 << (bits - 1), device=pixels.device)
    for tap in range(weights.shape[1]):
        pixel = pixels[:, (first + tap).clamp(max=pixels.shape[1] - 1)]
        total += pixel * weights[:, tap, None].long()
    return (total >> bits).clamp(0, 255).to(torch.uint8)
