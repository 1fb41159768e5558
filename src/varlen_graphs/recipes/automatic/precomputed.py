"""Buffers that replace the helpers of transformers.

From transformers 5.15 on, towers call helpers (of `transformers.vision_utils`, or of the tower's own file) for tensors
that follow from the grid. A helper gets the arguments of the call as `kwargs` and returns the tensor it finds there
under a standard name. Its other arguments are settings, so the helper calls of a tower determine its buffers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

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
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Order
from varlen_graphs.layouts.segments import Per, Windows
from varlen_graphs.outputs.entries import Entries, FrameRows, Rows
from varlen_graphs.recipes.clips import ClipCuts
from varlen_graphs.recipes.towers import block_places


@dataclass(frozen=True)
class HelperCall:
    """Call of a helper by the tower's own forward."""

    code: CodeType
    settings: Mapping[str, Any]  # its arguments by name
    line: str  # of the tower
    result: Any

    @property
    def helper(self) -> str:
        """Name of the helper."""
        return self.code.co_name


HelperCalls = Mapping[str, HelperCall]
"""The helper calls of a run, by helper."""

CountedExtent = Entries | FrameRows | Rows

SHUFFLE = "get_vision_pixel_shuffle_index"
"""Helper of towers that merge blocks of rows after their layers."""


@dataclass(frozen=True)
class Precomputed:
    """Declaration that replaces a helper."""

    buffers: tuple[Buffer, ...] = ()  # under the standard names of its tensors
    merge: int = 1  # divisor of the sides of a grid
    outputs: tuple[CountedExtent, ...] = ()  # extents that outputs may have because of it


def attention_seqlens(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return buffers for `cu_seqlens` and `max_seqlen`."""
    return Precomputed((*cu_seqlens(tower, call, calls).buffers, MaxSeqlen("max_seqlen", per=_per(call))))


def cu_seqlens(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return a buffer for `cu_seqlens`, per frame or per item."""
    return Precomputed((CuSeqlens("cu_seqlens", per=_per(call)),))


def max_seqlen(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return no buffer: the maxima are declared along with `cu_seqlens` and `cu_window_seqlens`."""
    if call.settings["kwarg_name"] not in ("max_seqlen", "max_window_seqlen"):
        raise not_replaced(call, f" for {call.settings['kwarg_name']}")
    return Precomputed()


def window_index(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return buffers for `window_index`, `cu_window_seqlens` and `max_window_seqlen`."""
    merge, side = call.settings["spatial_merge_size"], call.settings["window_size"] // call.settings["patch_size"]
    block = calls[SHUFFLE].settings["merge_size"] if SHUFFLE in calls else merge
    if side % block:
        raise not_replaced(call, f" for windows of {side} patches a side, which blocks of {block} do not fill")
    windows = Windows(side // block)
    segments = CuSeqlens("cu_window_seqlens", per=windows), MaxSeqlen("max_window_seqlen", per=windows)
    index: Buffer = WindowIndex(windows, "window_index")
    if block != merge:  # rows in raster order, which are merged later
        index = DeviceBuffer("window_index", lambda table: _rows_by_window(table, side), any_segments=False)
    return Precomputed((index, *segments), merge)


def pixel_shuffle_index(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return a buffer for `pixel_shuffle_index`, int64 `[rows]`: rows in raster order, taken block by block."""
    merge = call.settings["merge_size"]
    buffer = DeviceBuffer("pixel_shuffle_index", block_places, any_segments=False)
    return Precomputed((buffer,), merge, (Rows(every=merge**2),))


def position_ids(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return a buffer for `position_ids` of two or three axes."""
    order, merge = _order(call)
    axes: Any = ("t", "h", "w") if call.settings.get("include_temporal") else ("h", "w")
    return Precomputed((GridPositions("position_ids", order=order, axes=axes),), merge)


def interpolation(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return buffers for `interp_indices` and `interp_weights` of a square table."""
    settings, padding = call.settings, call.settings.get("padding", "border")
    if padding != "border" and (padding, settings["mode"], settings["align_corners"]) != ("zeros", "bilinear", False):
        raise not_replaced(call, f" with padding={padding!r} and mode={settings['mode']!r}")
    order, merge = _order(call)
    options = settings["num_grid_per_side"] ** 2, settings["mode"], settings["align_corners"], order
    indices = InterpolationIndices("interp_indices", *options)
    weights = InterpolationWeights("interp_weights", *options, padding=padding)
    if _is_turned(call, calls):
        return Precomputed((_Turned(indices.name, indices), _Turned(weights.name, weights)), merge)
    return Precomputed((indices, weights), merge)


def _is_turned(call: HelperCall, calls: HelperCalls) -> bool:
    """Return True if a helper gets heights as widths, unlike others."""
    grid = call.settings["grid_thw"]
    others = (other.settings["grid_thw"] for other in calls.values() if "grid_thw" in other.settings)
    return any(not torch.equal(grid, other) and torch.equal(grid[:, [0, 2, 1]], other) for other in others)


@dataclass(frozen=True)
class _Turned(Buffer):
    """Another buffer, of items whose heights are widths."""

    name: str
    buffer: Buffer
    any_segments = False

    def produce(self, table: ItemTable, module: nn.Module) -> Any:
        t, h, w, *columns = table.values.unbind(1)
        turned = ItemTable(torch.stack([t, w, h, *columns], 1), table.budget, table.layout)
        return self.buffer.produce(turned, module)


def frame_index(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return a buffer for `frame_index`, int64 `[rows]`: 0 in images, counted from 1 in videos."""

    def index(table: ItemTable) -> Tensor:
        frame, _, _ = table.positions("raster")
        return torch.where(table.t[table.row_item] > 1, frame + 1, 0)

    return Precomputed((DeviceBuffer("frame_index", index, any_segments=False),))


def temporal_merge_index(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return a buffer for `temporal_merge_index`, in the form that the helper of this transformers returns.

    A tuple is the place of each row among those of all tokens, its weight, and the number of tokens. A tensor, int64
    `[tokens, frames, rows of a block]`, is the rows of each token.
    """
    side, other = call.settings["kernel_height"], call.settings["kernel_width"]
    if side != other:
        raise not_replaced(call, f" with a kernel of {side} by {other}, which is not square")
    block = side * side

    def places(table: ItemTable) -> tuple[Tensor, Tensor, int]:
        tokens, item = table.budget.rows // block, table.row_item
        _, h, w = table.positions("raster")
        counts = table.h * table.w // block
        token = (counts.cumsum(0) - counts)[item] + h // side * (table.w[item] // side) + w // side
        place = token * block + h % side * side + w % side
        # Where rows are padding, the last token is as well: items have at most one token per block of rows.
        place = torch.where(table.row_active, place, tokens * block - 1).clamp(0, tokens * block - 1)
        return place, 1 / table.t[item].clamp(min=1).float(), tokens

    # The tower averages over frames and needs the same number of frames for all items of a call. The buffer uses the
    # least common multiple of all numbers up to `pos_emb_time` and repeats each frame to fill it: this keeps the mean.
    frames = math.lcm(*range(1, tower.config.pos_emb_time + 1))

    def rows_of_tokens(table: ItemTable) -> Tensor:
        tokens = table.h * table.w // block
        ends = tokens.cumsum(0)
        token = torch.arange(table.budget.rows // block, device=table.device)
        item = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
        h, w = table.h[item].clamp(min=1), table.w[item].clamp(min=side)
        across = w // side
        within = token - (ends - tokens)[item]
        corner = table.item_starts[item] + within // across * side * w + within % across * side
        frame = torch.arange(frames, device=table.device) * table.t[item, None] // frames
        at = torch.arange(block, device=table.device)
        in_block = at // side * w[:, None] + at % side
        rows: Tensor = corner[:, None, None] + frame[:, :, None] * (h * w)[:, None, None] + in_block[:, None]
        return rows.clamp(0, table.budget.rows - 1)

    function = places if isinstance(call.result, tuple) else rows_of_tokens
    buffer = DeviceBuffer("temporal_merge_index", function, any_segments=False)
    return Precomputed((buffer,), side, (FrameRows(every=block),))


def chunks(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return all buffers of audio: `padded_feature` (see `GATHERED`), `chunk_lengths`, `valid_indices` and so on."""
    chunk = 2 * call.settings["n_window"]
    windows = calls["get_audio_cu_seqlens"].settings.get("n_window_infer", chunk) // chunk
    lengths, tokens = call.result[1], len(calls["get_valid_indices"].result)
    stride = next((s for s in (1, 2, 4, 8, 16) if int(((lengths + s - 1) // s).sum()) == tokens), None)
    if stride is None:
        raise not_replaced(call, f", which makes {tokens} tokens of {lengths.tolist()} frames")
    cuts = ClipCuts(chunk, windows, stride)
    functions: dict[str, Callable[[ItemTable], Any]] = {
        "padded_feature": cuts.chunk_frames,
        "chunk_lengths": cuts.chunk_lengths,
        "valid_indices": cuts.token_places,
        "cu_seqlens": cuts.cu_seqlens,
        "max_seqlen": lambda table: cuts.window,
    }
    outputs = Entries(cuts.tokens, cuts.tokens_at)
    if "get_pool_indices" in calls:
        functions["pool_indices"] = cuts.pair_places
        outputs = Entries(cuts.pairs, cuts.pairs_at)
    buffers = [DeviceBuffer(name, function, any_segments=False) for name, function in functions.items()]
    return Precomputed(tuple(buffers), outputs=(outputs,))


def with_chunks(tower: Any, call: HelperCall, calls: HelperCalls) -> Precomputed:
    """Return no buffer: `chunks` declares the tensors of this helper."""
    return Precomputed()


HELPERS: dict[str, Callable[[Any, HelperCall, HelperCalls], Precomputed]] = {
    "get_vision_attention_seqlens": attention_seqlens,
    "get_vision_cu_seqlens": cu_seqlens,
    "get_max_seqlen": max_seqlen,
    "get_vision_window_index": window_index,
    "get_vision_position_ids": position_ids,
    "get_vision_interpolation_indices_and_weights": interpolation,
    SHUFFLE: pixel_shuffle_index,
    "get_vision_frame_index": frame_index,
    "get_vision_temporal_merge_index": temporal_merge_index,
    "chunk_and_pad_features": chunks,
    "get_audio_cu_seqlens": with_chunks,
    "get_valid_indices": with_chunks,
    "get_pool_indices": with_chunks,
}
"""Functions of the tower, the call and all calls that return the declaration for a helper."""

GATHERED = ("padded_feature",)
"""Arguments that are gathered from the rows; their buffers hold row indices and a mask of real rows."""


def precomputed(tower: Any, calls: Sequence[HelperCall]) -> Precomputed:
    """Return the declaration that replaces all helpers of `HELPERS` that a tower calls."""
    by_helper = {call.helper: call for call in calls}
    buffers: dict[str, Buffer] = {}
    merges = set()
    outputs: list[CountedExtent] = []
    for call in calls:
        replacement = HELPERS[call.helper](tower, call, by_helper)
        for buffer in replacement.buffers:
            known = buffers.setdefault(buffer.name, buffer)
            if known != buffer:
                raise SpecError(
                    f"{call.line} calls {call.helper} for {buffer}: expected {known}, as for an earlier call"
                )
        merges.add(replacement.merge)
        outputs += replacement.outputs
    if len(merges - {1}) > 1:
        raise SpecError(f"it calls helpers with the merge sizes {sorted(merges)}: expected one merge size")
    return Precomputed(tuple(buffers.values()), max(merges, default=1), tuple(outputs))


def not_replaced(call: HelperCall, how: str = "") -> SpecError:
    """Return the error for a helper call that the declaration cannot replace."""
    return SpecError(f"{call.line} calls {call.helper}{how}, which no buffer replaces")


def _rows_by_window(table: ItemTable, side: int) -> Tensor:
    """Return the rows, in raster order, window by window, int64 `[rows]`; padding comes last."""
    t, h, w = table.positions("raster")
    height, width = table.row_size
    frame = table.item_starts[table.row_item] + t * height * width
    window = frame + h // side * ((width + side - 1) // side) + w // side  # less than the start of the next frame
    return torch.where(table.row_active, window, table.budget.rows).argsort(stable=True)


def _per(call: HelperCall) -> Per:
    return "item" if call.settings["merge_temporal"] else "frame"


def _order(call: HelperCall) -> tuple[Order, int]:
    merge = call.settings["spatial_merge_size"]
    if not isinstance(merge, int):
        raise not_replaced(call, " with one merge size per item")
    return ("merge_block" if merge > 1 else "raster"), merge
