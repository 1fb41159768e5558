"""Boundaries and order of windows as torch operators."""

import torch
from torch import Tensor

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.windows import reference


def _fake_seqlens(values: Tensor, segments: int, side: int) -> Tensor:
    return values.new_empty(segments + 1, dtype=torch.int32)


def _fake_index(values: Tensor, tokens: int, merge: int, side: int, inverse: bool) -> Tensor:
    return values.new_empty(tokens)


cu_window_seqlens = operator(
    reference.cu_window_seqlens, fake=_fake_seqlens, cuda=launcher(__package__, "cu_window_seqlens")
)
window_index = operator(reference.window_index, fake=_fake_index, cuda=launcher(__package__, "window_index"))
