"""Qwen2.5-VL and the vision tower of Qwen2.5-Omni: images and videos; most layers attend within windows.

Follows `transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17, 5.23 and 5.24, and in Omni except for its three projections. Where the versions differ (the output type),
the recipe follows the installed one.

Rows are permuted to window order once, at the start. There a window is one segment and a frame is still one segment, so
both kinds of layers run on the same rows. The merged tokens are permuted back at the end.
"""

from typing import Any

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, MaxSeqlen, RotaryTable, WindowIndex
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.layouts.segments import Windows
from varlen_graphs.outputs.declared import Declared, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import patch_convolution, rms_norm, swiglu
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded, run_block, vision_spec, with_next_norm

PARTS = (
    "patch_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size", "spatial_merge_unit", "patch_size",
    "window_size", "fullatt_block_indexes",
)  # fmt: skip


@register("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5OmniVisionEncoder")
def qwen2_5_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: AttentionBackend = "auto",
    normalize: Normalize | Patches | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen2.5-VL or Qwen2.5-Omni.

    The encoder is called as the tower is, with `(hidden_states, grid_thw)`, and returns the tower's own output type
    with `pooler_output` `[rows / 4, out]` in the order of the call and `last_hidden_state` `[rows, hidden]` in window
    order, or with transformers 4.57 the former alone.

    Args:
        tower: `model.model.visual` of a whole model, or `model.thinker.visual` of an Omni model.
        budgets: As for `GraphedEncoder`; every window takes a segment. `None` is `Ladder()`, as far as memory and time
            allow. Row counts and ladders have one segment per quarter of a window (16 rows for windows of 8 x 8
            patches), which is enough for all images whose sides are at least half a window, 56 pixels.
        attention: The attention backend.
        normalize: If given, rows are bytes, normalised inside the graph, see `Normalize`, or images, see `Patches`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Qwen2.5-VL or Qwen2.5-Omni vision tower.
    """
    check_parts(
        tower,
        PARTS,
        "the vision tower of Qwen2.5-VL or Qwen2.5-Omni, which is model.model.visual of a whole model "
        "(model.thinker.visual for Omni)",
    )
    output_type = output_class(tower, "BaseModelOutputWithPooling")  # None in transformers 4.57
    merged = Rows(every=tower.spatial_merge_unit)

    def forward(
        tower: Any, hidden_states: Tensor, window_index: Tensor, reverse_indices: Tensor,
        position_embeddings: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        cu_window_seqlens: Tensor, max_window_seqlen: int, window_schedule: TileSchedule,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames = Segments(cu_seqlens, max_seqlen, schedule)
        windows = Segments(cu_window_seqlens, max_window_seqlen, window_schedule)
        tokens = rearrange(hidden_states, "(tokens unit) pixels -> tokens unit pixels", unit=tower.spatial_merge_unit)
        rows = rearrange(tokens[window_index], "tokens unit pixels -> (tokens unit) pixels")
        x = patch_convolution(rows, tower.patch_embed.proj)
        normed = rms_norm(x, tower.blocks[0].norm1)
        states = [x] if output_hidden_states else []
        for index, (block, next_norm) in enumerate(with_next_norm(tower.blocks)):
            # Read the indexes from the tower: torch.compile makes the numbers of a closure symbolic.
            segments = frames if index in tower.fullatt_block_indexes else windows
            x, normed = run_block(
                block, x, normed, next_norm, swiglu, segments=segments, rotary=position_embeddings, backend=attention
            )
            if output_hidden_states:
                states.append(x)
        pooled = tower.merger(x)[reverse_indices]
        if output_type is None:
            return pooled
        states_asked = recorded(states, x, output_hidden_states)
        return output_type(last_hidden_state=x, pooler_output=pooled, **states_asked)

    window = Windows(tower.window_size // tower.spatial_merge_size // tower.patch_size)
    attn = tower.blocks[0].attn
    buffers = [
        WindowIndex(window),
        WindowIndex(window, "reverse_indices", inverse=True),
        RotaryTable(order=window),
        *attention_buffers(attn, "frame"),
        CuSeqlens("cu_window_seqlens", per=window),
        MaxSeqlen("max_window_seqlen", per=window),
        AttentionSchedule(attn.num_heads, attn.head_dim, "window_schedule", per=window),
    ]
    outputs: Declared = merged
    if output_type is not None:
        outputs = Fields(last_hidden_state=Rows(), pooler_output=merged, hidden_states=Rows())
    spec = vision_spec(tower, buffers, outputs, normalize)
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)
