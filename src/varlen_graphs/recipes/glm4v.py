"""GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR and GLM-5.3-Flash: images, and videos as the frames they are made of.

Follows `transformers/models/glm4v/modeling_glm4v.py`, whose submodules it calls by name; they are the same in 4.57,
5.17 and 5.23, and in the other families. GLM-4.6V has the tower of GLM-4.1V. GLM-OCR and GLM-5.3-Flash have no position
embeddings, but norms of queries and keys.

Whole models hand the tower each frame of a video as an image. A video as one item, at which a tower with position
embeddings raises an error, means the same here: each frame is a segment, with positions of its own.
"""

from typing import Any

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
from varlen_graphs.recipes.blocks import add_norm, patch_convolution, rms_norm, split_heads, swiglu
from varlen_graphs.recipes.registry import handles
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.entries import Rows
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.outputs import Outputs
from varlen_graphs.spec.rows import PackedRows

PARTS = ("patch_embed", "rotary_pos_emb", "blocks", "post_layernorm", "downsample", "merger", "spatial_merge_size")


@handles("Glm4vVisionModel", "Glm4vMoeVisionModel", "GlmOcrVisionModel", "Glm5NextVisionModel")
def glm4v(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: Backend = "auto",
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR or GLM-5.3-Flash.

    The encoder takes what the tower takes, `(hidden_states, grid_thw)`, and gives what it gives: the tower's own output
    type with `last_hidden_state` `[rows / 4, out]`, the rows after the 2 x 2 convolution, and `pooler_output`
    `[rows / 4, out]`; or the tensor of transformers 4.57, which is the latter. A frame is one attention segment, be it
    an item or part of a video.

    Args:
        tower: `model.model.visual` of a whole model.
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
        "the vision tower of GLM-4.1V or one of its successors, which is model.model.visual of a whole model",
    )
    made = output_class(tower, "BaseModelOutputWithPooling")  # none in transformers 4.57
    merged = Rows(every=tower.spatial_merge_size**2)
    attn = tower.blocks[0].attn

    def forward(
        tower: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor],
        table: ItemTable,
    ) -> Any:
        x = _embed(tower, hidden_states, table)
        normed = rms_norm(x, tower.blocks[0].norm1)
        following = [*(block.norm1 for block in tower.blocks[1:]), tower.post_layernorm]
        for block, next_norm in zip(tower.blocks, following, strict=True):
            attn = block.attn
            q, k, v = split_heads(attn.qkv(normed), attn.num_heads, attn.head_dim)
            if hasattr(attn, "q_norm"):
                q, k = attn.q_norm(q), attn.k_norm(k)
            q, k = apply_rotary(q, k, *position_embeddings)
            attended = varlen_attention(
                q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, schedule=schedule, backend=attention
            )
            x, normed = add_norm(x, attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)")), block.norm2)
            x, normed = add_norm(x, swiglu(normed, block.mlp), next_norm)
        side = tower.spatial_merge_size
        blocks = rearrange(normed, "(blocks h w) dim -> blocks (dim h w)", h=side, w=side)
        downsampled = patch_convolution(blocks, tower.downsample)
        pooled = tower.merger(downsampled)
        return pooled if made is None else made(last_hidden_state=downsampled, pooler_output=pooled)

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
        outputs=merged if made is None else Outputs(last_hidden_state=merged, pooler_output=merged),
    )
    return GraphedEncoder(tower, Ladder() if budgets is None else budgets, spec, forward=forward, **options)


def _embed(tower: Any, patches: Tensor, table: ItemTable) -> Tensor:
    """Patches `[rows, channels * kernel]` to `[rows, dim]`, position embeddings added where the tower has some."""
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
