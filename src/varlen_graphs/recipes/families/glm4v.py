"""GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR and GLM-5.3-Flash: images, and videos as separate frames.

Follows `transformers/models/glm4v/modeling_glm4v.py`, whose submodules it calls by name; they are the same in 4.57,
5.17, 5.23 and 5.24, and in the other families. GLM-4.6V has the tower of GLM-4.1V. GLM-OCR and GLM-5.3-Flash have no
position embeddings, but norms of queries and keys.

Whole models pass each frame of a video to the tower as an image. A video as one item, for which a tower with position
embeddings raises an error, means the same here: each frame is a segment with its own positions.
"""

from typing import Any

from einops import rearrange
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
from varlen_graphs.recipes.blocks import patch_convolution, rms_norm, swiglu
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded, run_block, vision_spec, with_next_norm

PARTS = ("patch_embed", "rotary_pos_emb", "blocks", "post_layernorm", "downsample", "merger", "spatial_merge_size")


@register("Glm4vVisionModel", "Glm4vMoeVisionModel", "GlmOcrVisionModel", "Glm5NextVisionModel")
def glm4v(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: AttentionBackend = "auto",
    normalize: Normalize | Patches | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR or GLM-5.3-Flash.

    The encoder is called as the tower is, with `(hidden_states, grid_thw)`, and returns the tower's own output type
    with `last_hidden_state` `[rows / 4, out]`, the rows after the 2 x 2 convolution, and `pooler_output`
    `[rows / 4, out]`; or with transformers 4.57 the latter alone, a tensor. Each frame is one attention segment,
    whether it is an item or part of a video.

    Args:
        tower: `model.model.visual` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        normalize: If given, rows are bytes, normalised inside the graph, see `Normalize`, or images, see `Patches`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a GLM-4.1V vision tower.
    """
    check_parts(
        tower,
        PARTS,
        "the vision tower of GLM-4.1V or one of its successors, which is model.model.visual of a whole model",
    )
    output_type = output_class(tower, "BaseModelOutputWithPooling")  # None in transformers 4.57
    merged = Rows(every=tower.spatial_merge_size**2)

    def forward(
        tower: Any, hidden_states: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor], table: ItemTable,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames = Segments(cu_seqlens, max_seqlen, schedule)
        x = _embed(tower, hidden_states, table)
        normed = rms_norm(x, tower.blocks[0].norm1)
        states = [x] if output_hidden_states else []
        for block, next_norm in with_next_norm(tower.blocks, last=tower.post_layernorm):
            x, normed = run_block(
                block, x, normed, next_norm, swiglu, segments=frames, rotary=position_embeddings, backend=attention
            )
            if output_hidden_states:
                states.append(x)
        side = tower.spatial_merge_size
        blocks = rearrange(normed, "(blocks h w) dim -> blocks (dim h w)", h=side, w=side)
        downsampled = patch_convolution(blocks, tower.downsample)
        pooled = tower.merger(downsampled)
        if output_type is None:
            return pooled
        states_asked = recorded(states, downsampled, output_hidden_states)
        return output_type(last_hidden_state=downsampled, pooler_output=pooled, **states_asked)

    buffers = [*attention_buffers(tower.blocks[0].attn, "frame"), RotaryTable(order="merge_block"), item_table()]
    layers = [*[Rows()] * len(tower.blocks), merged]
    outputs: Declared = merged
    if output_type is not None:
        outputs = Fields(last_hidden_state=merged, pooler_output=merged, hidden_states=layers)
    spec = vision_spec(tower, buffers, outputs, normalize)
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _embed(tower: Any, patches: Tensor, table: ItemTable) -> Tensor:
    """Embed patches `[rows, channels * kernel]` as `[rows, dim]`, with position embeddings if the tower has them."""
    x = patch_convolution(patches, tower.patch_embed.proj)
    if not hasattr(tower, "embeddings"):
        return x
    return interpolate_positions(
        tower.embeddings.position_embedding.weight,
        table,
        mode=getattr(tower.embeddings, "interpolated_method", "bicubic"),
        order="merge_block",
        add=tower.post_conv_layernorm(x),
    )
