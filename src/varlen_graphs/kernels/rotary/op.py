"""The rotation of queries and keys, as an operator of torch."""

import torch
from torch import Tensor

from varlen_graphs.errors import InputError
from varlen_graphs.kernels.rotary import reference


@torch.library.custom_op("varlen_graphs::apply_rotary", mutates_args=())
def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.apply_rotary`."""
    _check(q, k, cos, sin)
    if not q.is_cuda or q.dtype == torch.float64:
        return reference.apply_rotary(q, k, cos, sin)
    from varlen_graphs.kernels.rotary import triton

    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    with torch.cuda.device_of(q):
        return triton.apply_rotary(q, k, cos, sin)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    table = (q.shape[0], q.shape[-1])
    same = q.dim() == k.dim() == 3 and (k.shape[0], k.shape[2]) == table and cos.shape == sin.shape == table
    if not same or q.shape[-1] % 2:
        raise InputError(
            f"apply_rotary got q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}: "
            "expected q and k [rows, heads, head_dim] with an even head_dim, cos and sin [rows, head_dim]"
        )


@apply_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))  # type: ignore[return-value]
