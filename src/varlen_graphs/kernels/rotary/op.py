"""Rotation of queries and keys as a torch operator."""

import torch
from torch import Tensor

from varlen_graphs.errors import InputError
from varlen_graphs.kernels.operator import operator
from varlen_graphs.kernels.rotary import reference


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the head dimension of queries and keys: `x * cos + rotate_half(x) * sin`, in float32.

    One launch on CUDA, which reads `q` and `k` in place from a packed projection and allocates the results. Never syncs
    with the host. For inference: there are no gradients on CUDA.

    Args:
        q: Queries, `[rows, heads, head_dim]`, any float dtype; `head_dim` even. Copied first if channels are not
            contiguous, or if heads are further apart than rows.
        k: Keys, `[rows, heads_k, head_dim]`, any float dtype. Copied first under the same conditions.
        cos: Cosines, `[rows, head_dim]`, any float dtype, as computed by a `RotaryTable`.
        sin: Sines, `[rows, head_dim]`, any float dtype.

    Returns:
        Rotated `q` and `k`, contiguous, each in its own dtype and shape.

    Raises:
        InputError: The shapes do not match, `head_dim` is odd, or a dtype is not floating.
    """
    table = (q.shape[0], q.shape[-1])
    same = q.dim() == k.dim() == 3 and (k.shape[0], k.shape[2]) == table and cos.shape == sin.shape == table
    floating = all(x.is_floating_point() for x in (q, k, cos, sin))
    if not same or not floating or q.shape[-1] % 2:
        hint = "try cos and sin of a RotaryTable"
        if cos.dim() == 2 and cos.shape[0] == table[0] and 0 < cos.shape[1] != table[1]:
            hint = (
                f"a RotaryTable has 2 * axes * frequencies channels, so declare axes and inv_freq that make {table[1]}"
                f", or rotate {cos.shape[1]} channels of each head, such as q[..., :{cos.shape[1]}]"
            )
        raise InputError(
            f"apply_rotary got q {q.dtype} {list(q.shape)}, k {k.dtype} {list(k.shape)}, cos {cos.dtype} "
            f"{list(cos.shape)}, sin {sin.dtype} {list(sin.shape)}: expected floating q and k [rows, heads, head_dim] "
            f"with an even head_dim, cos and sin [rows, head_dim]; {hint}"
        )
    rotated: tuple[Tensor, Tensor] = _operator(q, k, cos, sin)
    return rotated


def _cuda(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype == torch.float64:
        return reference.apply_rotary(q, k, cos, sin)
    from varlen_graphs.kernels.rotary import triton

    # The stride of heads is a constant of the kernel: heads that lie rows apart would compile one kernel per number of
    # rows.
    q, k = (x if x.stride(2) == 1 and x.stride(1) <= x.stride(0) else x.contiguous() for x in (q, k))
    cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (cos, sin))
    return triton.apply_rotary(q, k, cos, sin)


_operator = operator(reference.apply_rotary, cuda=_cuda)
