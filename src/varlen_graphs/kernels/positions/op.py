"""Where rows lie in their items, as an operator of torch."""

from torch import Tensor

from varlen_graphs.kernels.operator import operator
from varlen_graphs.kernels.positions import reference


def _fake(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    return values.new_empty(rows, len(axes.split()))


def _cuda(values: Tensor, rows: int, axes: str, merge: int) -> Tensor:
    from varlen_graphs.kernels.positions import triton

    return triton.positions(values, rows, axes, merge)


positions = operator(reference.positions, fake=_fake, cuda=_cuda)
