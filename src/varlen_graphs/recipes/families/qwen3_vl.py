"""Qwen3-VL, Qwen3.5 and Qwen3-Omni, and their MoE variants: images and videos, with deepstack features in most.

Follows `transformers/models/qwen3_vl/modeling_qwen3_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17, 5.23 and 5.24, and in the other families. Where the versions differ (the output type, and the dtype in which
position embeddings are interpolated), the recipe follows the installed one.
"""

from typing import Any

import torch
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import RotaryTable, interpolate_positions
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Declared, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import linear_activation, patch_convolution
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded, run_block, vision_spec, with_next_norm

PARTS = ("patch_embed", "pos_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size")


@register(
    "Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel", "Qwen3_5MoeVisionModel",
    "Qwen3OmniMoeVisionEncoder",
)  # fmt: skip
def qwen3_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: AttentionBackend = "auto",
    normalize: Normalize | Patches | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen3-VL, Qwen3.5 or Qwen3-Omni.

    The encoder is called as the tower is, with `(hidden_states, grid_thw)`, and returns the tower's own output type
    with `last_hidden_state` `[rows, hidden]`, `pooler_output` `[rows / 4, out]` and, except for Qwen3.5,
    `deepstack_features`, or the tuple of transformers 4.57. Each frame is one attention segment, so images and videos
    share all graphs.

    Args:
        tower: `model.model.visual` of a whole model, or `model.thinker.model.visual` of an Omni model (up to
            transformers 5.17 `model.thinker.visual`).
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        normalize: If given, rows are bytes, normalised inside the graph, see `Normalize`, or images, see `Patches`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Qwen3-VL vision tower.
    """
    check_parts(
        tower,
        PARTS,
        "the vision tower of Qwen3-VL, Qwen3.5 or Qwen3-Omni, which is model.model.visual of a whole model "
        "(model.thinker.model.visual for Omni)",
    )
    deep = hasattr(tower, "deepstack_merger_list")
    output_type = output_class(tower, "BaseModelOutputWithDeepstackFeatures" if deep else "BaseModelOutputWithPooling")
    merged = Rows(every=tower.spatial_merge_size**2)
    # Up to transformers 5.8, where the tower has this method, it interpolates in the dtype of the table.
    accum_dtype = None if hasattr(tower, "fast_pos_embed_interpolate") else torch.float32

    def forward(
        tower: Any, hidden_states: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor], table: ItemTable,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames = Segments(cu_seqlens, max_seqlen, schedule)
        patches = patch_convolution(hidden_states, tower.patch_embed.proj)
        x = interpolate_positions(
            tower.pos_embed.weight,
            table,
            mode=getattr(tower, "interpolation_mode", "bilinear"),
            align_corners=getattr(tower, "interpolation_align_corners", True),
            order="merge_block",
            accum_dtype=accum_dtype,
            add=patches,
        ).to(patches.dtype)  # the table may be of another one
        del patches  # the blocks reuse its memory
        deepstack = []
        # Read the indexes from the tower: torch.compile makes the numbers of a closure symbolic, which torch 2.11
        # rejects here.
        indexes = tower.deepstack_visual_indexes if deep else ()
        normed = tower.blocks[0].norm1(x)
        states = [x] if output_hidden_states else []
        for index, (block, next_norm) in enumerate(with_next_norm(tower.blocks)):
            x, normed = run_block(
                block, x, normed, next_norm, _mlp, segments=frames, rotary=position_embeddings, backend=attention
            )
            if output_hidden_states:
                states.append(x)
            if index in indexes:
                deepstack.append(tower.deepstack_merger_list[indexes.index(index)](x))
        pooled = tower.merger(x)
        if output_type is None:
            return pooled, deepstack
        features = {"deepstack_features": deepstack} if deep else {}
        output = output_type(last_hidden_state=x, pooler_output=pooled, **features)
        for name, layers in recorded(states, x, output_hidden_states).items():
            output[name] = layers  # behind the others, where transformers sets it, not in the order of the class
        return output

    outputs: Declared = (merged, merged)  # transformers 4.57
    if output_type is not None:
        fields = {"deepstack_features": merged} if deep else {}
        outputs = Fields(last_hidden_state=Rows(), pooler_output=merged, hidden_states=Rows(), **fields)
    buffers = [*attention_buffers(tower.blocks[0].attn, "frame"), RotaryTable(order="merge_block"), item_table()]
    spec = vision_spec(tower, buffers, outputs, normalize)
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _mlp(x: Tensor, mlp: Any) -> Tensor:
    out: Tensor = mlp.linear_fc2(linear_activation(x, mlp.linear_fc1, mlp.act_fn))
    return out
