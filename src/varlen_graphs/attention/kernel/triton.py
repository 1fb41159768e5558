"""Attention within segments as one persistent Triton kernel, over a tile schedule from another kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_graphs.attention.device import capability, multiprocessors
from varlen_graphs.attention.kernel.config import configuration, split
from varlen_graphs.kernels.launch import launch

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
SECTOR = 32
"""Bytes of a memory sector, the unit of a load."""
HALF = 64
"""Keys of the block after the blocks of 128, if at least as many are left."""
TAIL = 32
"""Keys per masked block: at the end of a segment and at the edges of a window."""
SHORT_TAIL = 16
"""Keys of the last block if no more are left, as in images of 224 or 448 pixels (196 and 784 rows)."""


@triton.jit
def _own(columns, shift, HEAD_DIM: tl.constexpr):
    """Mask the columns that belong to the head, if `shift` columns ahead of it are loaded too."""
    return (columns >= shift) & (columns < shift + HEAD_DIM)


@triton.jit
def _attend(
    acc0, acc1, total, largest, q0, q1, k, v, k0_desc, k1_desc, v0_desc, v1_desc, k_column, v_column,
    shift, rows, offset, start, stop, k_end, scale, bias,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to `stop`, block by block, to the running softmax of one tile of queries."""
    columns = tl.arange(0, BLOCK_N)
    dims0 = tl.arange(0, D0)
    dims1 = D0 + tl.arange(0, D1 if D1 else 16)
    own0, own1 = _own(dims0, shift, HEAD_DIM), _own(dims1, shift, HEAD_DIM)
    factor = scale if REACH is None else 1.0  # a bias is added to scaled scores
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        key = block + columns
        inside = key < k_end
        k_at = k + key[None, :].to(tl.int64) * K_ROW
        v_at = v + key[:, None].to(tl.int64) * V_ROW
        # Columns beside the head belong to its neighbours: Q is zero there. A pointer must not read them, because the
        # outer heads are next to other rows, which may be padding with NaN; a descriptor knows where the row ends.
        if MASKED:
            # Rows past the end of the segment belong to others or are padding: 0 * NaN is NaN, so do not load them.
            k0 = tl.load(k_at + dims0[:, None], mask=inside[None, :] & own0[:, None], other=0.0)
        elif DESCRIBED:
            k0 = k0_desc.load([block, k_column]).T
        else:
            k0 = tl.load(k_at + dims0[:, None], mask=own0[:, None], other=0.0)
        scores = tl.dot(q0, k0, input_precision=PRECISION)
        if D1:
            if MASKED:
                k1 = tl.load(k_at + dims1[:, None], mask=inside[None, :] & own1[:, None], other=0.0)
            elif DESCRIBED:
                k1 = k1_desc.load([block, k_column + D0]).T
            else:
                k1 = tl.load(k_at + dims1[:, None], mask=own1[:, None], other=0.0)
            scores = tl.dot(q1, k1, scores, input_precision=PRECISION)
        if REACH is not None:
            beyond = tl.minimum(tl.maximum(key[None, :] - rows[:, None] - offset, -REACH), REACH)
            scores = scores * scale + tl.load(bias + beyond).to(tl.float32) * _LOG2E
        if MASKED:
            visible = inside[None, :]
            distance = key[None, :] - rows[:, None] - offset
            if LEFT >= 0:
                visible = visible & (distance >= -LEFT)
            if RIGHT >= 0:
                visible = visible & (distance <= RIGHT)
            scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * factor)
        bound = larger
        if MASKED and (LEFT >= 0 or RIGHT >= 0):
            bound = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet
        weights = tl.exp2(scores * factor - bound[:, None])
        decay = tl.exp2(largest - bound)
        total = total * decay + tl.sum(weights, 1)
        largest = larger
        weights = weights.to(v.dtype.element_ty)
        if MASKED:
            v0 = tl.load(v_at + dims0[None, :], mask=inside[:, None] & own0[None, :], other=0.0)
        elif DESCRIBED:
            v0 = v0_desc.load([block, v_column])
        else:
            v0 = tl.load(v_at + dims0[None, :], mask=own0[None, :], other=0.0)
        acc0 = tl.dot(weights, v0, acc0 * decay[:, None], input_precision=PRECISION)
        if D1:
            if MASKED:
                v1 = tl.load(v_at + dims1[None, :], mask=inside[:, None] & own1[None, :], other=0.0)
            elif DESCRIBED:
                v1 = v1_desc.load([block, v_column + D0])
            else:
                v1 = tl.load(v_at + dims1[None, :], mask=own1[None, :], other=0.0)
            acc1 = tl.dot(weights, v1, acc1 * decay[:, None], input_precision=PRECISION)
    return acc0, acc1, total, largest


# Strides are constants: of an integer argument Triton knows only if 16 divides it, so that loads with a head stride of
# 72 would not be vectorized.
@triton.jit(do_not_specialize=["rows_k"])
def _attention(
    q, k, v, out, tiles, rows_k, k0_desc, k1_desc, v0_desc, v1_desc, scale, bias,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr,
    AHEAD: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, SHORT_TAIL: tl.constexpr, STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, REACH: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    dims0 = tl.arange(0, D0)
    dims1 = D0 + tl.arange(0, D1 if D1 else 16)
    begin = tl.load(tiles + 1) * HEADS if SHORT else 0
    for work in range(begin + tl.program_id(0), tl.load(tiles) * HEADS, tl.num_programs(0)):
        # All tiles of a head are consecutive: programs that run at the same time read the same keys.
        tile = tiles + 5 + work // HEADS * 5
        q_first = tl.load(tile)
        q_end = tl.load(tile + 1)
        k_start = tl.load(tile + 2)
        k_end = tl.minimum(tl.load(tile + 3), rows_k)
        index = work - tl.load(tile + 4) * HEADS
        count = tl.cdiv(q_end - q_first, BLOCK_M)
        head = index // count
        kv_head = (head // GROUP).to(tl.int64)
        q_start = q_first + index % count * BLOCK_M

        rows = q_start + tl.arange(0, BLOCK_M)
        present = (rows < q_end)[:, None]
        # Blocks of keys and values begin at memory sectors, for odd heads possibly ahead of the head. The compiler must
        # see the divisors of these numbers, or loads are not vectorized.
        shift = kv_head.to(tl.int32) % 2 * AHEAD
        k_column = (kv_head * K_HEAD).to(tl.int32) - shift
        v_column = (kv_head * V_HEAD).to(tl.int32) - shift
        k_head = k + kv_head * K_HEAD - shift
        v_head = v + kv_head * V_HEAD - shift

        q_at = q + rows[:, None].to(tl.int64) * Q_ROW + head.to(tl.int64) * Q_HEAD - shift
        q0 = tl.load(q_at + dims0[None, :], mask=present & _own(dims0, shift, HEAD_DIM)[None, :], other=0.0)
        q1 = q0
        if D1:
            q1 = tl.load(q_at + dims1[None, :], mask=present & _own(dims1, shift, HEAD_DIM)[None, :], other=0.0)

        bias_head = bias
        if REACH is not None:
            bias_head = bias + head * (2 * REACH + 1) + REACH

        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
        acc1 = tl.zeros([BLOCK_M, D1 if D1 else 16], tl.float32)

        # Keys that at least one query of the tile sees, and among them those that all of its queries see.
        offset = k_end - q_end
        last = tl.minimum(q_start + BLOCK_M, q_end) - 1
        low = k_start
        high = k_end
        all_low = k_start
        all_high = k_end
        if LEFT >= 0:
            low = tl.maximum(k_start, q_start + offset - LEFT)
            all_low = tl.maximum(k_start, last + offset - LEFT)
        if RIGHT >= 0:
            high = tl.minimum(k_end, last + offset + RIGHT + 1)
            all_high = tl.minimum(k_end, q_start + offset + RIGHT + 1)
        if LEFT >= 0:
            all_low = tl.minimum(low + tl.cdiv(tl.maximum(all_low - low, 0), TAIL) * TAIL, tl.maximum(high, low))
            acc0, acc1, total, largest = _attend(
                acc0, acc1, total, largest, q0, q1, k_head, v_head, k0_desc, k1_desc, v0_desc, v1_desc,
                k_column, v_column, shift, rows, offset, low, all_low, tl.minimum(all_low, high), scale, bias_head,
                K_ROW, V_ROW, LEFT, RIGHT, HEAD_DIM, D0, D1, TAIL, STAGES, True, DESCRIBED, PRECISION, REACH,
            )  # fmt: skip
        all_seen = tl.maximum(all_high, all_low)
        all_high = all_low + (all_seen - all_low) // BLOCK_N * BLOCK_N
        acc0, acc1, total, largest = _attend(
            acc0, acc1, total, largest, q0, q1, k_head, v_head, k0_desc, k1_desc, v0_desc, v1_desc,
            k_column, v_column, shift, rows, offset, all_low, all_high, k_end, scale, bias_head,
            K_ROW, V_ROW, LEFT, RIGHT, HEAD_DIM, D0, D1, BLOCK_N, STAGES, False, DESCRIBED, PRECISION, REACH,
        )  # fmt: skip
        if BLOCK_N > HALF:
            half_high = all_high + (all_seen - all_high) // HALF * HALF
            acc0, acc1, total, largest = _attend(
                acc0, acc1, total, largest, q0, q1, k_head, v_head, k0_desc, k1_desc, v0_desc, v1_desc,
                k_column, v_column, shift, rows, offset, all_high, half_high, k_end, scale, bias_head,
                K_ROW, V_ROW, LEFT, RIGHT, HEAD_DIM, D0, D1, HALF, 1, False, False, PRECISION, REACH,
            )  # fmt: skip
            all_high = half_high
        if high - all_high <= SHORT_TAIL:
            acc0, acc1, total, largest = _attend(
                acc0, acc1, total, largest, q0, q1, k_head, v_head, k0_desc, k1_desc, v0_desc, v1_desc,
                k_column, v_column, shift, rows, offset, all_high, high, high, scale, bias_head,
                K_ROW, V_ROW, LEFT, RIGHT, HEAD_DIM, D0, D1, SHORT_TAIL, STAGES, True, DESCRIBED, PRECISION, REACH,
            )  # fmt: skip
        else:
            acc0, acc1, total, largest = _attend(
                acc0, acc1, total, largest, q0, q1, k_head, v_head, k0_desc, k1_desc, v0_desc, v1_desc,
                k_column, v_column, shift, rows, offset, all_high, high, high, scale, bias_head,
                K_ROW, V_ROW, LEFT, RIGHT, HEAD_DIM, D0, D1, TAIL, STAGES, True, DESCRIBED, PRECISION, REACH,
            )  # fmt: skip

        norm = (1 / tl.where(total == 0, 1.0, total))[:, None]  # a query that sees no key keeps its zeros
        out_at = out + rows[:, None].to(tl.int64) * OUT_ROW + head * OUT_HEAD - shift
        kind = out.dtype.element_ty
        own = _own(dims0, shift, HEAD_DIM)
        tl.store(out_at + dims0[None, :], (acc0 * norm).to(kind), mask=present & own[None, :])
        if D1:
            own = _own(dims1, shift, HEAD_DIM)
            tl.store(out_at + dims1[None, :], (acc1 * norm).to(kind), mask=present & own[None, :])


def attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, block: int, scale: float, left: int, right: int,
    bias: Tensor | None = None, long: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `reference.varlen_attention` over the tile schedule of its segments, for contiguous channels.

    A persistent grid reads the number of tiles on the device: the cost follows the active rows, and depends neither on
    `max_seqlen` nor on the capacity for segments. One launch; allocates the output, unless `long` is given: contiguous
    output that holds the rows of long segments, into which the other rows are written.
    """
    rows, heads, head_dim = q.shape
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device) if long is None else long
    if rows == 0:
        return out
    config = configuration(head_dim, block, q.dtype, bias is not None)
    first, rest = split(head_dim)
    described = all(_describable(x, first + rest) for x in (k, v))
    descriptors: list[Any] = [None] * 4
    keys = config.keys if described else min(config.keys, HALF)  # larger blocks with pointers were not tested
    if described:
        descriptors = [_describe(x, keys, width) if width else None for x in (k, v) for width in (first, rest)]
    # More programs than full tiles keep busy would mostly find no tile left, and cost their start.
    chip = multiprocessors(q.device) if q.is_cuda else 1
    programs = min(chip * config.programs, max(chip, triton.cdiv(rows, block) * heads), (tiles.shape[0] - 1) * heads)
    launch(_attention, (programs,),
        q, k, v, out, tiles, k.shape[0], *descriptors, scale * LOG2E, bias,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        min(elements_ahead(x, first + rest) for x in (k, v)) if described else 0,
        HEADS=heads, GROUP=heads // k.shape[1], LEFT=left, RIGHT=right, HEAD_DIM=head_dim, D0=first, D1=rest,
        BLOCK_M=block, BLOCK_N=keys, HALF=HALF, TAIL=min(TAIL, keys),
        SHORT_TAIL=SHORT_TAIL, STAGES=config.stages, DESCRIBED=described,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", REACH=None if bias is None else bias.shape[1] // 2,
        SHORT=long is not None,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def _describable(x: Tensor, columns: int) -> bool:
    """Return True if the copy engine (TMA, Hopper and later) can load blocks of `x` as a matrix of its rows."""
    # It loads `columns` of a head. If the head has fewer, the others must belong to neighbouring heads: memory between
    # two heads is not part of `x` and may hold NaN. Triton takes only blocks that begin at multiples of 16 bytes.
    if x.is_cuda and capability(x.device) < (9, 0):
        return False
    steps = (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)
    aligned = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)
    own = columns == x.shape[2] or x.stride(1) == x.shape[2] or x.shape[1] == 1
    return aligned and own and x.stride(0) >= _width(x) and x.shape[0] > 0


def elements_ahead(x: Tensor, columns: int) -> int:
    """Return how many elements ahead of an odd head its blocks begin, so that all blocks begin at memory sectors."""
    # Heads of 72 channels in half precision lie 144 bytes apart, so every odd one begins in the middle of a sector. Of
    # the 80 columns loaded for an odd head, the first 8 belong to the previous head; for an even head, the last 8
    # belong to the next one.
    rows, heads, _ = (stride * x.element_size() % SECTOR for stride in x.stride())
    half = SECTOR // 2 // x.element_size()
    alternate = heads == SECTOR // 2 and rows == x.data_ptr() % SECTOR == 0
    return half if alternate and half <= columns - x.shape[2] else 0


def _describe(x: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [x.shape[0], _width(x)], [x.stride(0), 1], [rows, columns])


def _width(x: Tensor) -> int:
    """Return the number of elements from the first of a row to its last, over all heads."""
    return x.stride(1) * (x.shape[1] - 1) + x.shape[2]
