"""Antialiased resampling of a square table as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.kernels.antialias import reference
from varlen_graphs.kernels.operator import launcher, operator


def _fake(
    entries: Tensor, values: Tensor, rows: int, merge: int, accum_dtype: torch.dtype, add: Tensor | None = None
) -> Tensor:
    dtype = entries.dtype if add is None else torch.promote_types(entries.dtype, add.dtype)
    return entries.new_empty(rows, entries.shape[1], dtype=dtype)


antialias = operator(reference.antialias, fake=_fake, cuda=launcher(__package__, "antialias"))
