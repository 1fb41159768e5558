"""Backend `"torch"`: `torch.nn.attention.varlen`, which is FlashAttention 2."""

from typing import Any, cast

import torch
import torch.nn.attention
from torch import Tensor

from varlen_graphs.attention.inputs import UNALIGNED, AttentionInputs


def refusal(inputs: AttentionInputs, compiles: bool) -> str | None:
    """Return why FlashAttention does not support these inputs, or `None`."""
    q = inputs.q
    if (implementation := _flash_implementation()) != "FA2":
        # FA3 loads values past the end of a segment and multiplies them by 0: NaN in them makes the whole segment NaN.
        # FA4 was not tried with NaN.
        return (
            f"{implementation} as the implementation of FlashAttention: expected FA2, in which no NaN of an item "
            "reaches another; torch.nn.attention.restore_flash_attention_impl() brings it back"
        )
    if inputs.bias is not None:
        return "a bias: expected none"
    if q.shape[1] != inputs.k.shape[1]:
        return f"{q.shape[1]} query heads and {inputs.k.shape[1]} key heads: expected as many of each"
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256:
        return None if inputs.is_aligned else UNALIGNED
    return (
        f"{q.dtype} on {q.device} with head_dim {q.shape[2]}: expected float16 or bfloat16 on CUDA, head_dim a "
        "multiple of 8 up to 256"
    )


def run(inputs: AttentionInputs) -> Tensor:
    """Run `varlen_attn`. Padding rows of the output are arbitrary."""
    from torch.nn.attention.varlen import varlen_attn

    sides = inputs.left, inputs.right
    window: dict[str, Any] = {} if sides == (-1, -1) else {"window_size": sides}
    out = varlen_attn(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
        inputs.max_seqlen_q, inputs.max_seqlen_k, scale=inputs.scale, **window,
    )  # fmt: skip
    return cast(Tensor, out)  # a tuple only if more is requested


def _flash_implementation() -> str:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return str(current or "FA2")
