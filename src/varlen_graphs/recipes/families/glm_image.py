"""GLM-Image: packed images of any size.

Follows `transformers/models/glm_image/modeling_glm_image.py`, whose submodules it calls by name. The tower looks up the
size of each image by its frame, and so takes images alone. Here each frame of a video is an image.
"""

from typing import Any

from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import interpolate_positions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import linear_activation, patch_convolution
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded, run_block, with_next_norm

PARTS = ("embeddings", "patch_embed", "blocks", "spatial_merge_size")


@register("GlmImageVisionModel")
def glm_image(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of GLM-Image.

    The encoder is called as the tower is, with `pixel_values` `[rows, 3 * patch * patch]` and `grid_thw` `[items, 3]`,
    and returns the tower's own output type with `last_hidden_state` and `pooler_output`, both `[rows, hidden]`. Nothing
    syncs with the host.

    Args:
        tower: `model.model.visual` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a GLM-Image vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of GLM-Image, which is model.model.visual of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, table: ItemTable,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames, parts = Segments(cu_seqlens, max_seqlen, schedule), tower.embeddings
        x = interpolate_positions(
            parts.position_embedding.weight,
            table,
            mode=parts.interpolated_method,
            order="merge_block",
            add=patch_convolution(pixel_values, tower.patch_embed.proj),
        )
        states, normed = [x], tower.blocks[0].norm1(x)
        for block, next_norm in with_next_norm(tower.blocks):
            x, normed = run_block(block, x, normed, next_norm, _mlp, segments=frames, backend=attention)
            states.append(x)
        return output_type(last_hidden_state=x, pooler_output=x, **recorded(states, x, output_hidden_states))

    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.patch_embed.proj.weight[0].numel(),)),
        layout=GridTHW(merge=tower.spatial_merge_size),
        buffers=[*attention_buffers(tower.blocks[0].attn, "frame"), item_table()],
        outputs=Fields(last_hidden_state=Rows(), pooler_output=Rows(), hidden_states=Rows()),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _mlp(x: Tensor, mlp: Any) -> Tensor:
    out: Tensor = mlp.fc2(linear_activation(x, mlp.fc1, mlp.activation_fn))
    return out
