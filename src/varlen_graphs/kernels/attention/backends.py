"""What can run attention, what each backend takes and leaves in padding rows, and which one "auto" is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.attention
from torch import Tensor

from varlen_graphs.errors import InputError
from varlen_graphs.kernels.attention import reference
from varlen_graphs.kernels.attention.config import MAX_HEAD_DIM, tile_rows
from varlen_graphs.kernels.tile_schedule.op import tile_schedule

Backend = Literal["auto", "triton", "torch", "reference"]


class Call(NamedTuple):
    """The arguments of one attention; see `varlen_graphs.varlen_attention`. Without `tiles`, `block` means nothing."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tiles: Tensor | None
    block: int
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    left: int
    right: int


def run(call: Call, backend: str) -> Tensor:
    """Attention by one backend.

    Raises:
        InputError: The backend does not take these inputs.
    """
    if backend != "auto" and (reason := _REFUSALS[backend](call)):
        raise InputError(f"attention backend {backend!r} got {reason}; use backend='auto' or 'reference'")
    with torch.cuda.device_of(call.q):  # Triton and events go to the current device, wherever the tensors are
        return _RUN[_choose(call) if backend == "auto" else backend](call)


def _triton(call: Call) -> Tensor:
    """Our kernel. Padding rows are never read, and zero in the output."""
    from varlen_graphs.kernels.attention import triton

    tiles, block = _tiles(call)
    q, k, v = map(_row_by_row, (call.q, call.k, call.v))
    return triton.attention(q, k, v, tiles, block, call.scale, call.left, call.right)


def _tiles(call: Call) -> tuple[Tensor, int]:
    """The tile schedule of a call, computed if it has none, and the query rows a tile."""
    if call.tiles is not None:
        return call.tiles, call.block
    rows, heads, head_dim = call.q.shape
    block = tile_rows(head_dim, heads, rows, call.max_seqlen_q)
    return tile_schedule(call.cu_seqlens_q, call.cu_seqlens_k, rows, block), block


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


_RUN: dict[str, Callable[[Call], Tensor]] = {"triton": _triton, "torch": _torch, "reference": _reference}


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


_measuring = False
_chosen: dict[tuple[object, ...], str] = {}


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, "auto" times the backends that take a call, once for each size, and remembers the fastest.

    Synchronizes with the device. Outside, "auto" takes what was found, or our kernel where nothing was measured.
    """
    global _measuring
    before, _measuring = _measuring, True
    try:
        yield
    finally:
        _measuring = before


def _choose(call: Call) -> str:
    takes = [name for name in ("triton", "torch") if not _REFUSALS[name](call)]
    if len(takes) < 2:
        return takes[0] if takes else "reference"
    q, k = call.q, call.k
    key = (q.device, q.dtype, q.shape, k.shape, call.max_seqlen_q, call.max_seqlen_k, call.left, call.right)
    if key not in _chosen and _measuring and not torch.cuda.is_current_stream_capturing():
        calls = [call, *_with_long_segments(call)]
        _chosen[key] = min(takes, key=lambda name: sum(_milliseconds(_RUN[name], one) for one in calls))
    return _chosen.get(key, "triton")


def _with_long_segments(call: Call) -> list[Call]:
    """The same with segments as long as they may be: what graphs are captured with has many short ones."""
    if call.cu_seqlens_k.data_ptr() != call.cu_seqlens_q.data_ptr():
        return []
    boundary = torch.arange(call.cu_seqlens_q.shape[0], device=call.q.device)
    cu_seqlens = (boundary * call.max_seqlen_q).clamp(max=call.q.shape[0]).int()
    tiles, block = _tiles(call._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, tiles=None))
    return [call._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, tiles=tiles, block=block)]


def _milliseconds(function: Callable[[Call], Tensor], call: Call, repeats: int = 5) -> float:
    """Time on the device alone, as inside a graph: launches are queued behind a wait that outlasts them."""
    function(call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
    start.record()
    for _ in range(repeats):
        function(call)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats
