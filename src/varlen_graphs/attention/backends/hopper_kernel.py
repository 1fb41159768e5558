"""Backend `"hopper"`: the kernel for long segments of `attention.hopper`, and that of `"triton"` for the others."""

import torch
from torch import Tensor

from varlen_graphs.attention.hopper.config import HEAD_DIMS, long_keys, runs_on, tile_rows, times
from varlen_graphs.attention.inputs import UNALIGNED, AttentionInputs


def refusal(inputs: AttentionInputs, compiles: bool) -> str | None:
    """Return why the kernel does not support these inputs, or `None`. Compiles and checks it once."""
    q = inputs.q
    if inputs.bias is not None or (inputs.left, inputs.right) != (-1, -1) or not inputs.is_self_attention:
        return "a bias, a window, a causal mask or keys of other segments: expected none of them"
    rows, heads, head_dim = q.shape
    longest = min(inputs.max_seqlen_q, rows)
    if q.dtype not in (torch.float16, torch.bfloat16) or not runs_on(q.device, head_dim, longest):
        return (
            f"{q.dtype} on {q.device}, head_dim {head_dim} and segments of up to {longest} rows: expected float16 or "
            f"bfloat16 on a GPU of compute capability 9.0, head_dim a multiple of {HEAD_DIMS.step} from {HEAD_DIMS[0]} "
            f"to {HEAD_DIMS[-1]}, segments of {long_keys(head_dim)} rows and more"
        )
    from varlen_graphs.attention.hopper.launch import failure, parameters_of

    steps = [x.stride() for x in inputs[:3]]
    if not inputs.is_aligned or not all(0 < head <= row and head % 8 == 0 for row, head, _ in steps):
        return f"{UNALIGNED}; nor heads that lie rows apart"
    block = inputs.long_block or tile_rows(head_dim, heads, rows, longest)
    if block not in times(head_dim):
        return f"a schedule with tiles of {block} rows: expected one that was made for head_dim {head_dim}"
    return failure(parameters_of(inputs.k, inputs.v, block), q.device, compiles)


def run(inputs: AttentionInputs) -> Tensor:
    """Launch both kernels. Padding rows are read, but change nothing, and are zero in the output."""
    from varlen_graphs.attention.hopper import launch
    from varlen_graphs.attention.kernel import triton

    if inputs.long_tiles is None:  # a schedule made for other heads may call other segments long: one decides for both
        inputs = inputs._replace(tiles=None)
    q, k, v = inputs[:3]
    out = launch.attention(q, k, v, *inputs.long_schedule, inputs.scale)
    return triton.attention(q, k, v, *inputs.schedule, inputs.scale, -1, -1, long=out)
