"""Qwen3-VL, Qwen3.5 and Qwen3-Omni, and their MoE variants: images and videos, deepstack features where there are some.

Follows `transformers/models/qwen3_vl/modeling_qwen3_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17 and 5.23, and in the other families. Where the versions differ (the output type, and the dtype in which
position embeddings are interpolated), the recipe does what the installed one does.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend as Backend
from varlen_graphs.buffers import (
    AttentionSchedule,
    CuSeqlens,
    DeviceBuffer,
    MaxSeqlen,
    RotaryTable,
    interpolate_positions,
)
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layout.budgets import Budgets, Ladder
from varlen_graphs.layout.grids import GridTHW
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.recipes.blocks import add_norm, linear_activation, patch_convolution, split_heads
from varlen_graphs.recipes.registry import handles
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.entries import Rows
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.outputs import Declared, Outputs
from varlen_graphs.spec.rows import PackedRows

PARTS = ("patch_embed", "pos_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size")


@handles(
    "Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel", "Qwen3_5MoeVisionModel",
    "Qwen3OmniMoeVisionEncoder",
)  # fmt: skip
def qwen3_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: Backend = "auto",
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen3-VL, Qwen3.5 or Qwen3-Omni.

    The encoder takes what the tower takes, `(hidden_states, grid_thw)`, and gives what it gives: the tower's own output
    type with `last_hidden_state` `[rows, hidden]`, `pooler_output` `[rows / 4, out]` and, but for Qwen3.5,
    `deepstack_features`, or the tuple of transformers 4.57. A frame is one attention segment, so images and videos
    share all graphs.

    Args:
        tower: `model.model.visual` of a whole model, or `model.thinker.model.visual` of an Omni model (up to
            transformers 5.17 `model.thinker.visual`).
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`.
        attention: The attention backend.
        normalize: With this, rows are bytes, as processors give them with `do_rescale=False, do_normalize=False` and
            `.to(torch.uint8)`, and are normalised inside the graph.
        **options: Further arguments of `GraphedEncoder`.

    Raises:
        SpecError: `tower` lacks the parts of such a tower.
    """
    check_parts(
        tower,
        PARTS,
        "the vision tower of Qwen3-VL, Qwen3.5 or Qwen3-Omni, which is model.model.visual of a whole model "
        "(model.thinker.model.visual for Omni)",
    )
    deep = hasattr(tower, "deepstack_merger_list")
    made = output_class(tower, "BaseModelOutputWithDeepstackFeatures" if deep else "BaseModelOutputWithPooling")
    merged = Rows(every=tower.spatial_merge_size**2)
    attn = tower.blocks[0].attn
    outputs: Declared = (merged, merged)  # transformers 4.57
    if made is not None:
        fields = {"deepstack_features": merged} if deep else {}
        outputs = Outputs(last_hidden_state=Rows(), pooler_output=merged, **fields)

    def forward(
        tower: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor],
        table: ItemTable,
    ) -> Any:
        x = interpolate_positions(
            tower.pos_embed.weight,
            table,
            mode=getattr(tower, "interpolation_mode", "bilinear"),
            align_corners=getattr(tower, "interpolation_align_corners", True),
            order="merge_block",
            accum_dtype=accum_dtype,
            add=patch_convolution(hidden_states, tower.patch_embed.proj),
        )
        deepstack = []
        # Read from the tower: numbers of a closure are symbols to the compiler, which torch 2.11 takes for no others.
        indexes = tower.deepstack_visual_indexes if deep else ()
        normed = tower.blocks[0].norm1(x)
        for index, block in enumerate(tower.blocks):
            q, k, v = split_heads(block.attn.qkv(normed), block.attn.num_heads, block.attn.head_dim)
            q, k = apply_rotary(q, k, *position_embeddings)
            attended = varlen_attention(
                q, k, v, cu_seqlens, max_seqlen, scale=block.attn.scaling, schedule=schedule, backend=attention
            )
            x, normed = add_norm(
                x, block.attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)")), block.norm2
            )
            change = block.mlp.linear_fc2(linear_activation(normed, block.mlp.linear_fc1, block.mlp.act_fn))
            if index + 1 < len(tower.blocks):
                x, normed = add_norm(x, change, tower.blocks[index + 1].norm1)
            else:
                x = x + change
            if index in indexes:
                deepstack.append(tower.deepstack_merger_list[indexes.index(index)](x))
        pooled = tower.merger(x)
        if made is None:
            return pooled, deepstack
        features = {"deepstack_features": deepstack} if deep else {}
        return made(last_hidden_state=x, pooler_output=pooled, **features)

    # Interpolation in the dtype of the table is what the method of this name does, up to transformers 5.8.
    accum_dtype = None if hasattr(tower, "fast_pos_embed_interpolate") else torch.float32
    spec = BufferSpec(
        rows=PackedRows.pixels("hidden_states", tower.patch_embed.proj.weight[0].numel(), normalize),
        layout=GridTHW("grid_thw", merge=tower.spatial_merge_size),
        buffers=[
            CuSeqlens(per="frame"),
            MaxSeqlen(per="frame"),
            AttentionSchedule(heads=attn.num_heads, head_dim=attn.head_dim, per="frame"),
            RotaryTable(order="merge_block"),
            DeviceBuffer("table", lambda table: table, any_segments=False),
        ],
        outputs=outputs,
    )
    return GraphedEncoder(tower, Ladder() if budgets is None else budgets, spec, forward=forward, **options)
