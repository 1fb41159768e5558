"""What can run attention, and what each backend takes and leaves in padding rows."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.attention
from torch import Tensor

from varlen_graphs.attention import reference
from varlen_graphs.attention.call import Call
from varlen_graphs.attention.config import MAX_HEAD_DIM
from varlen_graphs.attention.timing import Run, fastest
from varlen_graphs.errors import InputError

Backend = Literal["auto", "triton", "torch", "reference"]


def run(call: Call, backend: str) -> Tensor:
    """Attention by one backend.

    Raises:
        InputError: The backend does not take these inputs.
    """
    if backend == "auto":
        takes = [name for name in ("triton", "torch") if not _REFUSALS[name](call)] or ["reference"]
    elif reason := _REFUSALS[backend](call):
        raise InputError(f"attention backend {backend!r} got {reason}; use backend='auto' or 'reference'")
    else:
        takes = [backend]
    if takes == ["reference"]:
        return _reference(call)
    with torch.cuda.device_of(call.q):  # Triton and events go to the current device, wherever the tensors are
        return _RUN[fastest(call, {name: _RUN[name] for name in takes})](call)


def _triton(call: Call) -> Tensor:
    """Our kernel. Padding rows are never read, and zero in the output."""
    from varlen_graphs.attention import triton

    tiles, block = call.schedule
    q, k, v = map(_row_by_row, (call.q, call.k, call.v))
    return triton.attention(q, k, v, tiles, block, call.scale, call.left, call.right)


def _row_by_row(x: Tensor) -> Tensor:
    """`x`, copied unless the heads of a row lie in it, and rows begin where vectors can be loaded.

    Strides are constants of the kernel: heads that lie rows apart would make for a kernel for each number of rows.
    """
    rows, heads, channels = x.stride()
    aligned = x.data_ptr() % 16 == 0 and rows * x.element_size() % 16 == 0
    sound = channels == 1 and heads <= rows and aligned
    return x if sound else x.clone(memory_format=torch.contiguous_format)


def _torch(call: Call) -> Tensor:
    """`torch.nn.attention.varlen`. Leaves anything in the padding rows of its output.

    FlashAttention 2 loads keys and values under a bound on the length of their segment, so padding rows are never read.
    FA3 and FA4 load whole tiles, past the end of the last segment, and 0 * NaN is NaN: for them values in padding rows
    are zeroed first.
    """
    from torch.nn.attention.varlen import varlen_attn

    k, v = call.k, call.v
    if _flash_implementation() != "FA2":
        row = torch.arange(v.shape[0], device=v.device)
        active = (row < call.cu_seqlens_k[-1:])[:, None, None]
        k, v = (torch.where(active, x, 0) for x in (k, v))
    window: dict[str, Any] = {} if (call.left, call.right) == (-1, -1) else {"window_size": (call.left, call.right)}
    out = varlen_attn(
        call.q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
        scale=call.scale, **window,
    )  # fmt: skip
    return cast(Tensor, out)  # a tuple only if more is asked for


def _reference(call: Call) -> Tensor:
    """Plain torch operations. Padding rows reach no other row, and are zero in the output."""
    return reference.varlen_attention(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.scale, call.left, call.right
    )


_RUN: dict[str, Run] = {"triton": _triton, "torch": _torch, "reference": _reference}


def _triton_refuses(call: Call) -> str | None:
    q = call.q
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[2] <= MAX_HEAD_DIM:
        return None
    return (
        f"{q.dtype} on {q.device} with head_dim {q.shape[2]}: expected float16, bfloat16 or float32 on CUDA, head_dim "
        f"up to {MAX_HEAD_DIM}"
    )


def _torch_refuses(call: Call) -> str | None:
    q = call.q
    if q.shape[1] != call.k.shape[1]:
        return f"{q.shape[1]} query heads and {call.k.shape[1]} key heads: expected as many of each"
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256:
        return None
    return (
        f"{q.dtype} on {q.device} with head_dim {q.shape[2]}: expected float16 or bfloat16 on CUDA, head_dim a "
        "multiple of 8 up to 256"
    )


_REFUSALS: dict[str, Callable[[Call], str | None]] = {
    "triton": _triton_refuses,
    "torch": _torch_refuses,
    "reference": lambda call: None,
}


def _flash_implementation() -> str:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return str(current or "FA2")
