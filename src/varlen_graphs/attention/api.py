"""Public functions of attention: `varlen_attention`, and `tile_schedule` for layers that share one schedule."""

from typing import get_args

import torch
from torch import Tensor

from varlen_graphs.attention import op
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.attention.hopper.config import runs_on
from varlen_graphs.attention.schedule import TileSchedule, long_tiles_of, tiles_of
from varlen_graphs.errors import InputError

__all__ = ["TileSchedule", "Window", "tile_schedule", "varlen_attention"]

Window = tuple[int, int]
"""Number of keys before and after its own position that a query sees; -1 means all."""


def tile_schedule(
    cu_seqlens: Tensor, max_seqlen: int, *, rows: int, heads: int, head_dim: int, cu_seqlens_k: Tensor | None = None
) -> TileSchedule:
    """Compute the schedule that `varlen_attention` otherwise computes in every layer.

    One small launch and one small allocation, or two of each where segments may be long on a Hopper GPU. Never syncs
    with the host: the number of tiles stays on the device. The rows per tile follow from the other arguments and are
    frozen at capture.

    Args:
        cu_seqlens: Segments of the queries, int32 `[segments + 1]`: starts at 0, ascends, may end in equal values.
        max_seqlen: Upper bound on the rows of the longest segment.
        rows: Query rows, padding included.
        heads: Query heads.
        head_dim: Channels per head.
        cu_seqlens_k: Segments of keys and values, int32 `[segments + 1]`. If `None`, those of the queries.

    Returns:
        The schedule, for `schedule=` of `varlen_attention` with the very same `cu_seqlens` and `cu_seqlens_k`.

    Raises:
        InputError: `cu_seqlens` or `cu_seqlens_k` has another dtype, shape or device.
    """
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check_boundaries(cu_seqlens, cu_seqlens_k, cu_seqlens.device)
    segments, sizes = _contiguous(cu_seqlens, cu_seqlens_k), (rows, heads, head_dim, max_seqlen)
    long: tuple[Tensor | None, int] = (None, 0)
    own = segments[1] is segments[0]
    if own and not torch.compiler.is_compiling() and runs_on(cu_seqlens.device, head_dim, min(max_seqlen, rows)):
        long = long_tiles_of(segments[0], *sizes)
    return TileSchedule(*tiles_of(*segments, *sizes), *long, rows, cu_seqlens, cu_seqlens_k)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    schedule: TileSchedule | None = None,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Compute softmax attention of each packed row over the rows of its segment.

    Never syncs with the host, except when an encoder times backends before a capture. Allocates the output. For
    inference: there are no gradients on CUDA.

    Rows after `cu_seqlens[-1]` are padding. They may hold anything, NaN included, and change no other row by a bit.
    Under autocast, `q`, `k` and `v` are cast to its dtype, as by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q: Queries, `[rows, heads, head_dim]`, floating.
        k: Keys, `[rows_k, heads_k, head_dim]`, dtype of `q`; `heads_k` divides `heads`, and each key head serves
            `heads / heads_k` query heads.
        v: Values, `[rows_k, heads_k, head_dim]`, dtype of `q`.
        cu_seqlens: Segments of the queries, int32 `[segments + 1]`: starts at 0, ascends up to at most `rows`, the tail
            may repeat the last value. Checked on the CPU only, because a look at a tensor elsewhere would sync.
        max_seqlen: Upper bound on the rows of the longest segment. Frozen at capture.
        cu_seqlens_k: Segments of keys and values, int32 `[segments + 1]`. If `None`, those of the queries. The output
            of a segment without keys is zero.
        max_seqlen_k: Upper bound on the keys of the longest segment, frozen at capture. If `None`, `max_seqlen`.
        scale: Factor on the scores, above 0. If `None`, `head_dim ** -0.5`.
        causal: If True, a query sees no key after its own position. The last query of a segment is aligned with the
            last key. Overrides the right side of `window`.
        window: Number of keys before and after its own position that a query sees, `(left, right)`; -1 means all.
        bias: Floating `[heads, 2 * reach + 1]`, finite: entry `reach + offset` is added in float32 to the scaled scores
            of keys `offset` positions after the query. The first and the last entry hold for all offsets beyond
            `-reach` and `reach`, as the last buckets of T5 do.
        schedule: Result of `tile_schedule` for these very tensors `cu_seqlens` and `cu_seqlens_k`. If `None`, it is
            computed here if the backend needs one.
        backend: One of

            - `"triton"`: the kernel of this package, whose cost follows the active rows (CUDA; float16, bfloat16 and
              float32; `head_dim` up to 256);
            - `"hopper"`: the same, with another kernel, compiled at its first use, for segments of at least 192 keys
              (`head_dim` 64), 320 (up to 96) or 480 (GPUs of compute capability 9.0; float16 and bfloat16; `head_dim` a
              multiple of 8 from 64 to 128; self-attention without `window`, `causal` and `bias`);
            - `"torch"`: `torch.nn.attention.varlen` (CUDA; float16 and bfloat16; `head_dim` a multiple of 8 up to 256;
              `heads_k` equal to `heads`; no `bias`);
            - `"reference"`: plain torch operations (any device and dtype; memory grows with the square of the rows);
            - `"auto"`: the fastest of the first three for this size, as timed when graphs are captured; the first that
              supports the inputs if none was timed; the reference if none does.

    Returns:
        `[rows, heads, head_dim]` in the dtype of `q`. Padding rows are zero, but arbitrary with `"torch"`.

    Raises:
        InputError: Shapes, dtypes or devices do not match, `cu_seqlens` is not int32 or, on the CPU, not the boundaries
            of segments, the schedule was computed from other tensors, or the backend does not support these inputs.
    """
    if backend not in get_args(AttentionBackend):
        raise InputError(f"attention backend {backend!r}: expected one of {get_args(AttentionBackend)}")
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    max_seqlen_k = max_seqlen if max_seqlen_k is None else max_seqlen_k
    q, k, v = _as_autocast(q, k, v)
    _check_shapes(q, k, v)
    _check_boundaries(cu_seqlens, cu_seqlens_k, q.device)
    if not (_is_size(max_seqlen) and _is_size(max_seqlen_k)):
        raise InputError(f"max_seqlen={max_seqlen!r}, max_seqlen_k={max_seqlen_k!r}: expected integers of at least 0")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window
    if causal:
        right = 0
    if not scale > 0 or left < -1 or right < -1:
        raise InputError(
            f"scale={scale}, window={window}: expected scale > 0 and window sizes of at least -1 (all keys)"
        )
    _check_bias(bias, q)
    tiles: tuple[Tensor | None, int, Tensor | None, int] = (None, 0, None, 0)
    if schedule is not None:  # the operator computes one: torch.compile would guard on a choice by size made here
        _check_schedule(schedule, q.shape[0], cu_seqlens, cu_seqlens_k)
        # Small budgets have no long tiles, and torch.compile would guard on that: the operator computes them there.
        compiling = torch.compiler.is_compiling()
        long = (None, 0) if compiling else (schedule.long_tiles, schedule.long_block)
        tiles = schedule.tiles, schedule.block, *long
    segments = _contiguous(cu_seqlens, cu_seqlens_k)
    bias = None if bias is None else bias.contiguous()
    out: Tensor = op.attention(q, k, v, *segments, *tiles, max_seqlen, max_seqlen_k, scale, left, right, backend, bias)
    return out


def _is_size(value: object) -> bool:
    """Return True for a number of rows; torch.compile would guard on a comparison of its own numbers."""
    return isinstance(value, torch.SymInt) or (isinstance(value, int) and value >= 0)


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, in the dtype of autocast if that is on; as elsewhere in torch, float64 is not cast."""
    cast = []
    for x in tensors:
        if isinstance(x, Tensor) and x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type):
            eligible = x.is_floating_point() and x.dtype is not torch.float64
            x = x.to(torch.get_autocast_dtype(x.device.type)) if eligible else x
        cast.append(x)
    return cast


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is of type {type(value).__name__}: expected a tensor")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
    same = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.is_floating_point()
    if not same or not alike or 0 in (q.shape[1], q.shape[2], k.shape[1]) or q.shape[1] % k.shape[1]:
        tensors = zip("qkv", (q, k, v), strict=True)
        described = ", ".join(f"{name} {x.dtype} {list(x.shape)} on {x.device}" for name, x in tensors)
        raise InputError(
            f"varlen_attention got {described}: expected [rows, heads, head_dim] of one floating dtype and device, k "
            "and v of one shape, with a number of heads that divides that of q"
        )


def _check_bias(bias: Tensor | None, q: Tensor) -> None:
    if bias is None:
        return
    _check_tensor("bias", bias)
    heads, sound = q.shape[1], bias.is_floating_point() and bias.device == q.device
    if not sound or bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] % 2 != 1:
        raise InputError(
            f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}: expected floating [{heads}, 2 * reach + 1] on "
            f"{q.device}, an entry for each head and offset from -reach to reach"
        )


def _check_boundaries(cu_seqlens: Tensor, cu_seqlens_k: Tensor, device: torch.device) -> None:
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        _check_tensor(name, x)
        if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] < 1 or x.device != device:
            raise InputError(
                f"{name} is {x.dtype} {list(x.shape)} on {x.device}: expected int32 [segments + 1] on {device}; "
                "try .int()"
            )
    if cu_seqlens.shape != cu_seqlens_k.shape:
        raise InputError(
            f"cu_seqlens_k is {list(cu_seqlens_k.shape)}, cu_seqlens {list(cu_seqlens.shape)}: expected as many "
            "segments of keys as of queries; for a segment without keys, repeat its start"
        )


def _contiguous(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return both contiguous, as kernels load them; one tensor if both are one."""
    contiguous = cu_seqlens.contiguous()
    return contiguous, contiguous if cu_seqlens_k is cu_seqlens else cu_seqlens_k.contiguous()


def _check_schedule(schedule: TileSchedule, rows: int, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that the schedule was computed from these tensors: comparing the values of others would sync."""
    if schedule.rows != rows:
        raise InputError(
            f"the schedule was computed for {schedule.rows} query rows, but q has {rows}: compute it with rows={rows}"
        )
    if not _same(schedule.cu_seqlens, cu_seqlens) or not _same(schedule.cu_seqlens_k, cu_seqlens_k):
        raise InputError(
            "the schedule was computed from other tensors than cu_seqlens and cu_seqlens_k, and its segments would be "
            "used instead of theirs: pass these very tensors to tile_schedule, or declare AttentionSchedule with the "
            "per= and queries= of CuSeqlens; or omit the schedule"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling():  # the compiler cannot see data pointers
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
