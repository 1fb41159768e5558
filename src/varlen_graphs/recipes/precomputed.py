"""What towers of transformers take precomputed, by the helper that computes it otherwise.

From transformers 5.15 on, towers ask helpers (`transformers.vision_utils`, or functions beside the tower) for tensors
that follow from the grid. A helper takes the arguments of the call as `kwargs`, and what it finds there under a
standard name it gives back. Its other arguments are the settings, so what a tower needs is known from the helpers it
calls.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.buffers import (
    Buffer,
    CuSeqlens,
    DeviceBuffer,
    GridPositions,
    InterpolationIndices,
    InterpolationWeights,
    MaxSeqlen,
    WindowIndex,
)
from varlen_graphs.errors import SpecError
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Order
from varlen_graphs.layout.segments import Per, Windows
from varlen_graphs.recipes.clips import ClipCuts
from varlen_graphs.spec.entries import Entries, FrameRows


@dataclass(frozen=True)
class HelperCall:
    """One call of a helper, made by a tower in a run of its own.

    Attributes:
        helper: The name of the helper.
        settings: Its arguments by name.
        line: The line of the tower that calls it.
        result: What it gave.
    """

    helper: str
    settings: Mapping[str, Any]
    line: str
    result: Any


Counted = Entries | FrameRows


@dataclass(frozen=True)
class Precomputed:
    """What takes the place of a helper.

    Attributes:
        buffers: What gives the tensors, by their standard names.
        merge: What sides of the grid must be divisible by.
        outputs: What outputs may have entries for on its account.
    """

    buffers: tuple[Buffer, ...] = ()
    merge: int = 1
    outputs: tuple[Counted, ...] = ()


Calls = Mapping[str, HelperCall]
"""The calls of a run, by helper."""


def attention_seqlens(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`cu_seqlens` and `max_seqlen`."""
    return Precomputed((*cu_seqlens(tower, call, calls).buffers, MaxSeqlen("max_seqlen", per=_per(call))))


def cu_seqlens(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`cu_seqlens`, of frames or of whole items."""
    return Precomputed((CuSeqlens("cu_seqlens", per=_per(call)),))


def max_seqlen(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`max_seqlen` and `max_window_seqlen`, which are declared along with `cu_seqlens` and `cu_window_seqlens`."""
    if call.settings["kwarg_name"] not in ("max_seqlen", "max_window_seqlen"):
        raise _unknown(call, f" for {call.settings['kwarg_name']}")
    return Precomputed()


def window_index(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`window_index`, `cu_window_seqlens` and `max_window_seqlen`."""
    merge = call.settings["spatial_merge_size"]
    windows = Windows(call.settings["window_size"] // merge // call.settings["patch_size"])
    return Precomputed(
        (
            WindowIndex(windows, "window_index"),
            CuSeqlens("cu_window_seqlens", per=windows),
            MaxSeqlen("max_window_seqlen", per=windows),
        ),
        merge,
    )


def position_ids(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`position_ids` of two or three axes."""
    order, merge = _order(call)
    axes: Any = ("t", "h", "w") if call.settings.get("include_temporal") else ("h", "w")
    return Precomputed((GridPositions("position_ids", order=order, axes=axes),), merge)


def interpolation(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`interp_indices` and `interp_weights` of a square table."""
    settings = call.settings
    if settings.get("padding", "border") != "border":
        raise _unknown(call, f" with padding={settings['padding']!r}")
    order, merge = _order(call)
    options: dict[str, Any] = {
        "entries": settings["num_grid_per_side"] ** 2,
        "mode": settings["mode"],
        "align_corners": settings["align_corners"],
        "order": order,
    }
    indices, weights = (
        InterpolationIndices("interp_indices", **options),
        InterpolationWeights("interp_weights", **options),
    )
    return Precomputed((indices, weights), merge)


def frame_index(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`frame_index`: 0 in images, and in videos 1 for the rows of the first frame; int64 `[rows]`."""

    def index(table: ItemTable) -> Tensor:
        frame, _, _ = table.positions("raster")
        return torch.where(table.t[table.row_item] > 1, frame + 1, 0)

    return Precomputed((DeviceBuffer("frame_index", index, any_segments=False),))


def temporal_merge_index(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """`temporal_merge_index`: the rows that pool into each merged token, int64 `[tokens, frames, rows of a block]`.

    The tower takes the mean over frames, of which all items of a call have to have the same number. Here it is the
    least one that every number of frames up to `pos_emb_time` divides; each frame comes as often as fills it, which
    leaves the mean what it is.
    """
    side, other = call.settings["kernel_height"], call.settings["kernel_width"]
    if side != other:
        raise _unknown(call, f" with a kernel of {side} by {other}, which is no square")
    places, block = math.lcm(*range(1, tower.config.pos_emb_time + 1)), side * side

    def index(table: ItemTable) -> Tensor:
        tokens = table.h * table.w // block
        ends = tokens.cumsum(0)
        token = torch.arange(table.budget.rows // block, device=table.device)
        item = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
        h, w = table.h[item].clamp(min=1), table.w[item].clamp(min=side)
        across = w // side
        within = token - (ends - tokens)[item]
        corner = table.item_starts[item] + within // across * side * w + within % across * side
        frame = torch.arange(places, device=table.device) * table.t[item, None] // places
        at = torch.arange(block, device=table.device)
        in_block = at // side * w[:, None] + at % side
        rows: Tensor = corner[:, None, None] + frame[:, :, None] * (h * w)[:, None, None] + in_block[:, None]
        return rows.clamp(0, table.budget.rows - 1)

    buffer = DeviceBuffer("temporal_merge_index", index, any_segments=False)
    return Precomputed((buffer,), side, (FrameRows(every=block),))


def chunks(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """All of audio: `padded_feature`, `chunk_lengths`, `valid_indices`, `cu_seqlens`, `max_seqlen`, `pool_indices`.

    `padded_feature` is made of rows: the buffer says which, and the forward gathers them (see `GATHERED`).
    """
    chunk = 2 * call.settings["n_window"]
    windows = calls["get_audio_cu_seqlens"].settings.get("n_window_infer", chunk) // chunk
    lengths, tokens = call.result[1], len(calls["get_valid_indices"].result)
    stride = next((s for s in (1, 2, 4, 8, 16) if int(((lengths + s - 1) // s).sum()) == tokens), None)
    if stride is None:
        raise _unknown(call, f", which gives {lengths.tolist()} frames {tokens} tokens")
    cuts = ClipCuts(chunk, windows, stride)
    made: dict[str, Callable[[ItemTable], Any]] = {
        "padded_feature": cuts.chunk_frames,
        "chunk_lengths": cuts.chunk_lengths,
        "valid_indices": cuts.token_places,
        "cu_seqlens": cuts.cu_seqlens,
        "max_seqlen": lambda table: cuts.window,
    }
    outputs = Entries(cuts.tokens, cuts.tokens_at)
    if "get_pool_indices" in calls:
        made["pool_indices"] = cuts.pair_places
        outputs = Entries(cuts.pairs, cuts.pairs_at)
    buffers = [DeviceBuffer(name, function, any_segments=False) for name, function in made.items()]
    return Precomputed(tuple(buffers), outputs=(outputs,))


def with_chunks(tower: Any, call: HelperCall, calls: Calls) -> Precomputed:
    """What is declared along with chunks."""
    return Precomputed()


HELPERS: dict[str, Callable[[Any, HelperCall, Calls], Precomputed]] = {
    "get_vision_attention_seqlens": attention_seqlens,
    "get_vision_cu_seqlens": cu_seqlens,
    "get_max_seqlen": max_seqlen,
    "get_vision_window_index": window_index,
    "get_vision_position_ids": position_ids,
    "get_vision_interpolation_indices_and_weights": interpolation,
    "get_vision_frame_index": frame_index,
    "get_vision_temporal_merge_index": temporal_merge_index,
    "chunk_and_pad_features": chunks,
    "get_audio_cu_seqlens": with_chunks,
    "get_valid_indices": with_chunks,
    "get_pool_indices": with_chunks,
}
"""What takes the place of each helper: from the tower, the call and all calls."""

GATHERED = ("padded_feature",)
"""Arguments that are rows in another order; their buffers give which row is where, and whether there is one."""


def precomputed(tower: Any, calls: list[HelperCall]) -> Precomputed:
    """What takes the place of all helpers that a tower calls.

    Raises:
        SpecError: A helper, or a setting of one, that nothing here takes the place of; two settings for one name.
    """
    by_helper = {call.helper: call for call in calls}
    buffers: dict[str, Buffer] = {}
    merges = set()
    outputs: list[Counted] = []
    for call in calls:
        if call.helper not in HELPERS:
            raise _unknown(call)
        one = HELPERS[call.helper](tower, call, by_helper)
        for buffer in one.buffers:
            known = buffers.setdefault(buffer.name, buffer)
            if known != buffer:
                raise SpecError(f"{call.line} asks {call.helper} for {buffer}, but there is {known} of the same name")
        merges.add(one.merge)
        outputs += one.outputs
    if len(merges - {1}) > 1:
        raise SpecError(f"helpers are called with the merge sizes {sorted(merges)}: expected one")
    return Precomputed(tuple(buffers.values()), max(merges, default=1), tuple(outputs))


def _per(call: HelperCall) -> Per:
    return "item" if call.settings["merge_temporal"] else "frame"


def _order(call: HelperCall) -> tuple[Order, int]:
    merge = call.settings["spatial_merge_size"]
    if not isinstance(merge, int):
        raise _unknown(call, " with a merge size for each item")
    return ("merge_block" if merge > 1 else "raster"), merge


def _unknown(call: HelperCall, how: str = "") -> SpecError:
    return SpecError(f"{call.line} calls {call.helper}{how}, and no buffer takes its place")
