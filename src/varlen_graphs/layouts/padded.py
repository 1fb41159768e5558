"""Tensors of padded batches."""

from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError


def real_rows(lengths: Tensor, length: int) -> Tensor:
    """Return the real rows of a padded batch as a mask, bool `[batch, length]`, from `lengths` `[batch]`."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def key_padding_mask(is_real: Tensor, dtype: torch.dtype, real: bool) -> Tensor:
    """Convert a mask of real rows to the convention of a module: `real` for real rows, in `dtype`."""
    return (is_real if real else ~is_real).to(dtype)


def check_mask_dtype(declaration: Any, dtype: torch.dtype) -> None:
    """Check that a mask can have this dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        raise SpecError(
            f"{declaration!r}: expected torch.bool or an integer dtype; let the module turn the mask into scores"
        )


def shifted(batch: Tensor, shift: Tensor) -> Tensor:
    """Return `[batch, length, ...]` with the tokens of each text moved `shift` `[batch]` places on, around the end."""
    length = batch.shape[1]
    places = (torch.arange(length, device=batch.device) - shift.to(batch.device)[:, None]) % length
    return batch[torch.arange(len(batch), device=batch.device)[:, None], places]
