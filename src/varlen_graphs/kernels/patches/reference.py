"""Patches of images in plain torch operations: the specification."""

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.kernels.items.reference import coordinates


def patches(
    values: Tensor, images: Tensor, constants: Tensor, size: int, frames: int, merge: int, dtype: torch.dtype
) -> Tensor:
    """Cut images into patches, in the order of the tower's rows, and normalise each channel.

    Args:
        values: Sizes `t`, `h`, `w` of the items in patches, int64 `[items, 3]`; zeros in padding.
        images: Bytes of the items one after the other, uint8 `[rows, size * size * channels]`: `t` images of an item,
            each `[h * size, w * size, channels]`. Bytes after the last item are padding and may hold anything.
        constants: Factor and summand of each channel, float32 `[2, channels]`.
        size: Height and width of a patch.
        frames: How often each patch is repeated: processors repeat images to make the frames of a temporal patch.
        merge: Side of the blocks of patches that rows are ordered by.
        dtype: Dtype of the result; the arithmetic is float32.

    Returns:
        `[rows, channels * frames * size * size]`, in that order, as Hugging Face processors return it. Padding
        rows hold a patch of arbitrary bytes.
    """
    (rows, _), channels = images.shape, constants.shape[1]
    place = coordinates(values, rows, merge)
    first = torch.arange(rows, device=images.device) - place.row + place.t * place.height * place.width
    pixel = torch.arange(size, device=images.device)
    y, x = (rearrange(at, "rows -> rows 1") * size + pixel for at in (place.h, place.w))
    width = rearrange(place.width, "rows -> rows 1 1") * size
    place_in_image = rearrange(y, "rows y -> rows y 1") * width + rearrange(x, "rows x -> rows 1 x")
    start = rearrange(first, "rows -> rows 1 1") * size * size
    flat = images.reshape(-1, channels)
    found = flat[(start + place_in_image).clamp(0, max(0, len(flat) - 1))].float()  # [rows, y, x, channels]
    normal = torch.addcmul(constants[1], found, constants[0])
    normal = normal.to(dtype)
    return rearrange(normal[:, None].expand(-1, frames, -1, -1, -1), "rows t y x c -> rows (c t y x)")
