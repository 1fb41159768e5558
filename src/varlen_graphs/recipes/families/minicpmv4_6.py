"""MiniCPM-V 4.6 and 4.7, and MiniCPM-OCR, as transformers has them: slices of any size, merged between two layers.

Follows `transformers/models/minicpmv4_6/modeling_minicpmv4_6.py`, whose submodules it calls by name. The tower reads
the sizes of slices on the host for its positions, its windows and its attention; here all of these are in the graph.
"""

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, tile_schedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import DeviceBuffer, Lookup
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import patch_convolution, project_heads, siglip_layers
from varlen_graphs.recipes.families.merged_or_whole import MergedOrWhole
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, block_places, check_parts, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded

PARTS = ("embeddings", "encoder", "post_layernorm", "vit_merger")

WINDOW = 2
"""Side of the windows that the tower merges to one row each."""

LARGEST = 1024
"""Largest number of patches along a side with position ids. Slices have about 1024 patches in total."""


@register("MiniCPMV4_6VisionModel", "MiniCPMV4_7VisionModel", "MiniCPMOcrVisionModel")
def minicpmv4_6(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of MiniCPM-V 4.6 or 4.7, or of MiniCPM-OCR.

    The encoder is called as the tower is, with `pixel_values` `[1, 3, patch, patch * patches]`, slices or frames one
    after another, and `target_sizes` `[slices, 2]`, their height and width in patches. It returns the tower's own
    output type with `last_hidden_state` `[1, patches / 4, hidden]`. Calls with `use_vit_merger=False`, those of
    MiniCPM-OCR by default, merge no windows and return `[1, patches, hidden]`: `encoder.whole` has graphs of their own.
    Nothing syncs with the host.

    Args:
        tower: `model.model.vision_tower` of a whole model.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of such a tower, or merges other windows than 2 x 2, or after
            its last layer; or all slices at the size of the first one, as in transformers 5.17.
    """
    check_parts(tower, PARTS, "the vision tower of MiniCPM-V 4.6, which is model.model.vision_tower of a whole model")
    if hasattr(sys.modules[type(tower.vit_merger).__module__], "get_vision_merged_shape"):
        raise SpecError(
            f"{type(tower).__name__} of this version of transformers merges all slices of a call as though they had "
            "the size of the first one: expected one that merges each at its own size, as transformers 5.23 does"
        )
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    cut, layers, parts = tower.config.insert_layer_id + 1, len(tower.encoder.layers), tower.embeddings
    if not 0 < cut < layers or {*tower.vit_merger.window_kernel_size} != {WINDOW}:
        raise SpecError(
            f"{type(tower).__name__} merges windows of {tower.vit_merger.window_kernel_size} after layer {cut - 1} of "
            f"{layers}: expected 2 x 2, and a layer before the last one"
        )
    ids = _position_ids(parts.num_patches_per_side, parts.position_embedding.weight.device)

    def embedded(tower: Any, pixel_values: Tensor, buckets: Tensor) -> Tensor:
        parts = tower.embeddings
        patches = rearrange(pixel_values, "1 c i (patches j) -> patches (c i j)", j=parts.patch_size)
        positions = parts.position_embedding(buckets[:, 0] * parts.num_patches_per_side + buckets[:, 1])
        x: Tensor = patch_convolution(patches, parts.patch_embedding) + positions
        return x

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, buckets: Tensor,
        places: Tensor, merged: Segments, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        all_layers, first = [*tower.encoder.layers], list[Tensor]()
        x = embedded(tower, pixel_values, buckets)
        x = siglip_layers(all_layers[:cut], x, None, cu_seqlens, max_seqlen, schedule, attention, states=first)
        x, later = _merge(tower.vit_merger, x[places]), list[Tensor]()
        x = siglip_layers(all_layers[cut:], x, tower.post_layernorm, *merged, attention, states=later)[None]
        states = [state[None] for state in [*first, *later[1:]]]
        return output_type(last_hidden_state=x, **recorded(states, x, output_hidden_states))

    def whole(
        itself: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        buckets: Tensor, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        tower, states = itself.tower, list[Tensor]()
        segments = cu_seqlens, max_seqlen, schedule
        x = embedded(tower, pixel_values, buckets)
        x = siglip_layers(tower.encoder.layers, x, tower.post_layernorm, *segments, attention, states=states)[None]
        layers = [state[None] for state in states]
        return output_type(last_hidden_state=x, **recorded(layers, x, output_hidden_states))

    def merged(table: ItemTable) -> Segments:
        return _merged(table, tower.encoder.layers[0].self_attn)

    size = parts.patch_size
    rows = InputRows("pixel_values", (1, parts.patch_embedding.in_channels, size, size), rows_dim=3, strip=True)
    before, after = Rows(rows_dim=1), Rows(every=WINDOW**2, rows_dim=1)
    buffers = [
        *attention_buffers(tower.encoder.layers[0].self_attn, "item"),
        Lookup("buckets", lambda size: ids[size, :size], largest=LARGEST),
    ]
    spec = BufferSpec(
        rows,
        GridHW("target_sizes", merge=WINDOW),
        [
            *buffers,
            DeviceBuffer("places", block_places, any_segments=False),
            DeviceBuffer("merged", merged, any_segments=False),
        ],
        Fields(last_hidden_state=after, hidden_states=[before] * (cut + 1) + [after] * (layers - cut)),
        declared_by="recipe",
    )
    outputs = Fields(last_hidden_state=before, hidden_states=[before] * (layers + 1))
    of_whole = BufferSpec(rows, GridHW("target_sizes"), buffers, outputs, declared_by="recipe")
    return MergedOrWhole(tower, budgets, spec, of_whole, forward, whole, **options)


def _merged(table: ItemTable, attn: Any) -> Segments:
    """Return the segments of slices whose windows are merged."""
    budget, windows = table.budget, WINDOW**2
    of_merged = Budget(budget.rows // windows, budget.items, budget.items, -(-budget.max_seqlen // windows))
    sides = torch.tensor([1, WINDOW, WINDOW], device=table.device)
    slices = ItemTable(table.values // sides, of_merged, GridHW())
    cu_seqlens, longest = slices.cu_seqlens("item"), slices.max_seqlen("item")
    schedule = tile_schedule(cu_seqlens, longest, rows=of_merged.rows, heads=attn.num_heads, head_dim=attn.head_dim)
    return Segments(cu_seqlens, longest, schedule)


def _merge(merger: Any, x: Tensor) -> Tensor:
    """Merge windows of rows that adjoin, `[rows, dim]`, to one row each, `[rows / 4, dim]`."""
    attn, windows = merger.self_attn, WINDOW**2
    projections = attn.q_proj, attn.k_proj, attn.v_proj
    heads = project_heads(merger.layer_norm1(x), projections, attn.num_heads, attn.head_dim)
    q, k, v = (rearrange(each, "(n window) heads dim -> n heads window dim", window=windows) for each in heads)
    attended = F.scaled_dot_product_attention(q, k, v, scale=attn.scaling)
    x = x + attn.out_proj(rearrange(attended, "n heads window dim -> (n window) (heads dim)"))
    rows = rearrange(x, "(n window) dim -> n window dim", window=windows)
    hidden = merger.act(merger.linear_1(merger.pre_norm(rows.flatten(1))))
    out: Tensor = merger.linear_2(hidden) + rows.mean(1)
    return out


@cache
def _position_ids(side: int, device: torch.device) -> Tensor:
    """Return the positions, 0 to `side - 1`, of the patches along a side of each size, int64 `[sizes, patches]`."""
    # The expressions of `get_vision_nearest_position_ids` of transformers, on the device of the tower: others round
    # differently.
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device=device)
    ids = torch.zeros(LARGEST + 1, LARGEST, dtype=torch.int64, device=device)
    for size in range(1, LARGEST + 1):
        ids[size, :size] = torch.bucketize(torch.arange(size, device=device) / size, boundaries, right=True)
    return ids.cpu()
