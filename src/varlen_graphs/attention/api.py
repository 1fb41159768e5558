"""Attention within segments: one entry, several backends, and the tile schedule that all layers share.

Every backend promises: rows after `cu_seqlens[-1]` are padding, they may hold anything, NaN included, and no other row
changes by a bit because of them. What a backend leaves in the padding rows of its own output differs: zeros (`triton`
and `reference`), or anything (`torch`).
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from varlen_graphs.attention import op
from varlen_graphs.attention.backends import Backend
from varlen_graphs.attention.config import tile_rows
from varlen_graphs.attention.tile_schedule import op as schedule_op
from varlen_graphs.errors import InputError

Window = tuple[int, int]
"""How many keys before and after its own place a query sees; -1: all."""


@dataclass(frozen=True)
class TileSchedule:
    """Which tile of queries is which part of which segment: computed once a forward, used by all layers.

    Attributes:
        tiles: int32 `[1 + tiles, 5]`; see `varlen_graphs.kernels.tile_schedule.reference`.
        block: Query rows a tile.
        rows: Query rows, padding included.
        cu_seqlens: The segments of the queries that it was computed from.
        cu_seqlens_k: Those of the keys.
    """

    tiles: Tensor
    block: int
    rows: int
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor


def tile_schedule(
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    rows: int,
    heads: int,
    head_dim: int,
    cu_seqlens_k: Tensor | None = None,
) -> TileSchedule:
    """Compute the schedule that `varlen_attention` would otherwise compute for itself in every layer.

    One small launch, no sync. The number of tiles stays on the device.

    Args:
        cu_seqlens: int32 `[segments + 1]`, the segments of the queries.
        max_seqlen: At least the rows of the longest segment.
        rows: Query rows, padding included.
        heads: Query heads.
        head_dim: Channels a head.
        cu_seqlens_k: int32 `[segments + 1]`, the segments of keys and values; `None`: those of the queries.

    Raises:
        InputError: Boundaries of another dtype or shape.
    """
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check_boundaries(cu_seqlens, cu_seqlens_k, cu_seqlens.device)
    # Torch's compiler would compile once for each side of each number of rows at which the choice changes.
    block = 64 if torch.compiler.is_compiling() else tile_rows(head_dim, heads, rows, max_seqlen)
    tiles = schedule_op.tile_schedule(*_contiguous(cu_seqlens, cu_seqlens_k), rows, block)
    return TileSchedule(tiles, block, rows, cu_seqlens, cu_seqlens_k)


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
    schedule: TileSchedule | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax attention of each packed row over the rows of its segment. Never syncs with the host.

    For inference: there are no gradients on CUDA.

    Args:
        q: Queries, `[rows, heads, head_dim]`.
        k: Keys, `[rows_k, heads_k, head_dim]`; `heads_k` divides `heads`, and each serves as many query heads.
        v: Values, as `k`.
        cu_seqlens: int32 `[segments + 1]`: starts at 0, ascends up to at most the rows there are (which nobody looks
            at), the tail may repeat the last value.
        max_seqlen: At least the rows of the longest segment. Frozen at capture, so an upper bound.
        cu_seqlens_k: The segments of keys and values, where they are not those of the queries; a segment without keys
            gives zeros.
        max_seqlen_k: At least the longest of those.
        scale: Factor on the scores, above 0; default `head_dim ** -0.5`.
        causal: No query sees keys after its own place. The last query of a segment is level with the last key.
        window: How many keys before and after its own place a query sees, `(left, right)`; -1: all.
        schedule: What `tile_schedule` gave for these very tensors `cu_seqlens` and `cu_seqlens_k`; `None`: computed
            here, if the backend needs one.
        backend: `"triton"` (CUDA; our kernel, whose cost follows the rows that are there), `"torch"`
            (`torch.nn.attention.varlen`, CUDA, float16 and bfloat16), `"reference"` (any device and dtype, memory that
            grows with the square of the rows), or `"auto"`: the fastest as measured when graphs are captured, our
            kernel where nothing was measured, and the reference where neither takes these inputs.

    Returns:
        `[rows, heads, head_dim]`, dtype of `q`; padding rows hold what the backend leaves there (see above).

    Raises:
        InputError: Shapes, devices or a schedule that do not belong together, boundaries of another dtype, or a backend
            that does not take these inputs.
    """
    if backend not in get_args(Backend):
        raise InputError(f"attention backend {backend!r}: expected one of {get_args(Backend)}")
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    max_seqlen_k = max_seqlen if max_seqlen_k is None else max_seqlen_k
    _check_shapes(q, k, v)
    _check_boundaries(cu_seqlens, cu_seqlens_k, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window
    if causal:
        right = 0
    if not scale > 0 or left < -1 or right < -1:
        raise InputError(f"scale={scale}, window={window}: expected a scale above 0, and sizes of at least -1")
    if schedule is None:
        tiles, block = None, 0  # the operator chooses: a choice by size here would be one for the compiler to guard
    else:
        _check_schedule(schedule, q.shape[0], cu_seqlens, cu_seqlens_k)
        tiles, block = schedule.tiles, schedule.block
    segments = _contiguous(cu_seqlens, cu_seqlens_k)
    out: Tensor = op.attention(q, k, v, *segments, tiles, block, max_seqlen, max_seqlen_k, scale, left, right, backend)
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    same = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.is_floating_point()
    if not same or not alike or 0 in (q.shape[1], q.shape[2], k.shape[1]) or q.shape[1] % k.shape[1]:
        tensors = zip("qkv", (q, k, v), strict=True)
        described = ", ".join(f"{name} {x.dtype} {list(x.shape)} on {x.device}" for name, x in tensors)
        raise InputError(
            f"varlen_attention got {described}: expected [rows, heads, head_dim] of one floating dtype and device, k "
            "and v alike, with heads that divide those of q"
        )


def _check_boundaries(cu_seqlens: Tensor, cu_seqlens_k: Tensor, device: torch.device) -> None:
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] < 1 or x.device != device:
            raise InputError(
                f"{name} is {x.dtype} {list(x.shape)} on {x.device}: expected int32 [segments + 1] on {device}; "
                "try .int()"
            )
    if cu_seqlens.shape != cu_seqlens_k.shape:
        raise InputError(
            f"cu_seqlens_k is {list(cu_seqlens_k.shape)}, cu_seqlens {list(cu_seqlens.shape)}: expected as many "
            "segments of keys as of queries; a segment without keys repeats its start"
        )


def _contiguous(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """The same as kernels load them; one tensor where it was one."""
    contiguous = cu_seqlens.contiguous()
    return contiguous, contiguous if cu_seqlens_k is cu_seqlens else cu_seqlens_k.contiguous()


def _check_schedule(schedule: TileSchedule, rows: int, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> None:
    """Whether a schedule was computed from these tensors: the values of others may differ, and cannot be looked at."""
    if schedule.rows != rows:
        raise InputError(
            f"the schedule is one of {schedule.rows} query rows, and there are {rows}: compute it with rows={rows}"
        )
    if not _same(schedule.cu_seqlens, cu_seqlens) or not _same(schedule.cu_seqlens_k, cu_seqlens_k):
        raise InputError(
            "the schedule was computed from other tensors than cu_seqlens and cu_seqlens_k, and would win over them: "
            "give tile_schedule these very tensors, or declare AttentionSchedule with the per= and queries= of "
            "CuSeqlens; or leave the schedule out"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling():  # which cannot see where tensors are
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
