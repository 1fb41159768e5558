"""The check where the table is: the reference on the CPU, the Triton kernel on CUDA.

No operator of torch, unlike kernels that are part of a module: it runs before a replay, outside of any graph or
compiled code, where the dispatch of an operator in Python would take longer than everything else.
"""

from collections.abc import Callable

from torch import Tensor

from varlen_graphs.kernels.check import reference


def check_items_on(table: Tensor) -> Callable[..., None]:
    """`reference.check_items` for where `table` is."""
    if not table.is_cuda:
        return reference.check_items
    from varlen_graphs.kernels.check import triton

    return triton.check_items
