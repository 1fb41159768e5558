"""Qwen2-VL: images and videos, without windows, position embeddings or deepstack features.

Follows `transformers/models/qwen2_vl/modeling_qwen2_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17, 5.23 and 5.24. Where the versions differ (the output type), the recipe follows the installed one.
"""

from typing import Any

from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import RotaryTable
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.outputs.declared import Declared, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import linear_activation, patch_convolution
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded, run_block, vision_spec, with_next_norm

PARTS = ("patch_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size")


@register("Qwen2VisionTransformerPretrainedModel")
def qwen2_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: AttentionBackend = "auto",
    normalize: Normalize | Patches | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen2-VL.

    The encoder is called as the tower is, with `(hidden_states, grid_thw)`, and returns the tower's own output type
    with `last_hidden_state` `[rows, hidden]` and `pooler_output` `[rows / 4, out]`, or with transformers 4.57 the
    latter alone. Each frame is one attention segment.

    Args:
        tower: `model.model.visual` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        normalize: If given, rows are bytes, normalised inside the graph, see `Normalize`, or images, see `Patches`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Qwen2-VL vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of Qwen2-VL, which is model.model.visual of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")  # None in transformers 4.57
    merged = Rows(every=tower.spatial_merge_size**2)

    def forward(
        tower: Any, hidden_states: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor],
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames = Segments(cu_seqlens, max_seqlen, schedule)
        x = patch_convolution(hidden_states, tower.patch_embed.proj)
        normed = tower.blocks[0].norm1(x)
        states = [x] if output_hidden_states else []
        for block, next_norm in with_next_norm(tower.blocks):
            x, normed = run_block(
                block, x, normed, next_norm, _mlp, segments=frames, rotary=position_embeddings, backend=attention
            )
            if output_hidden_states:
                states.append(x)
        pooled = tower.merger(x)
        if output_type is None:
            return pooled
        states_asked = recorded(states, x, output_hidden_states)
        return output_type(last_hidden_state=x, pooler_output=pooled, **states_asked)

    buffers = [*attention_buffers(tower.blocks[0].attn, "frame"), RotaryTable(order="merge_block")]
    outputs: Declared = merged
    if output_type is not None:
        outputs = Fields(last_hidden_state=Rows(), pooler_output=merged, hidden_states=Rows())
    spec = vision_spec(tower, buffers, outputs, normalize)
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _mlp(x: Tensor, mlp: Any) -> Tensor:
    out: Tensor = mlp.fc2(linear_activation(x, mlp.fc1, mlp.act))
    return out
