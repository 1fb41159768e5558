"""The check of items that the host has not seen, as an operator of torch."""

from torch import Tensor

from varlen_graphs.kernels.check import reference
from varlen_graphs.kernels.operator import operator


def _fake(
    header: Tensor,
    table: Tensor,
    padding: Tensor,
    status: Tensor,
    veil: Tensor,
    merge: int,
    multiple: int,
    segments: int,
    longest: int,
    frames: bool,
    whole: bool,
) -> None:
    pass


def _cuda(
    header: Tensor,
    table: Tensor,
    padding: Tensor,
    status: Tensor,
    veil: Tensor,
    merge: int,
    multiple: int,
    segments: int,
    longest: int,
    frames: bool,
    whole: bool,
) -> None:
    from varlen_graphs.kernels.check import triton

    triton.check_items(header, table, padding, status, veil, merge, multiple, segments, longest, frames, whole)


check_items = operator(reference.check_items, fake=_fake, cuda=_cuda, changes=("table", "status", "veil"))
