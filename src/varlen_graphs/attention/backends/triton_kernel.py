"""Backend `"triton"`: the kernel of this package, `varlen_graphs.attention.kernel.triton`."""

import torch
from torch import Tensor

from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.kernel.config import MAX_HEAD_DIM


def refusal(inputs: AttentionInputs, compiles: bool) -> str | None:
    """Return why the kernel does not support these inputs, or `None`."""
    q = inputs.q
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[2] <= MAX_HEAD_DIM:
        return None
    return (
        f"{q.dtype} on {q.device} with head_dim {q.shape[2]}: expected float16, bfloat16 or float32 on CUDA, head_dim "
        f"up to {MAX_HEAD_DIM}"
    )


def run(inputs: AttentionInputs) -> Tensor:
    """Launch the kernel. Padding rows are never read, and are zero in the output."""
    from varlen_graphs.attention.kernel import triton  # imports triton, which `import varlen_graphs` must not

    tiles, block = inputs.schedule
    q, k, v = map(_row_by_row, (inputs.q, inputs.k, inputs.v))
    return triton.attention(q, k, v, tiles, block, inputs.scale, inputs.left, inputs.right, inputs.bias)


def _row_by_row(x: Tensor) -> Tensor:
    """Return `x`, copied unless each row holds its heads and rows are aligned for vector loads."""
    # Strides are constants of the kernel: heads that lie rows apart would compile one kernel per number of rows.
    rows, heads, channels = x.stride()
    aligned = x.data_ptr() % 16 == 0 and rows * x.element_size() % 16 == 0
    sound = channels == 1 and heads <= rows and aligned
    return x if sound else x.clone(memory_format=torch.contiguous_format)
