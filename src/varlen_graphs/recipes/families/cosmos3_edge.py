"""Cosmos 3 Edge: images and videos through the transformer of SigLIP 2.

Follows `transformers/models/cosmos3_edge/modeling_cosmos3_edge.py`, whose submodules it calls by name. The tower reads
the grid on the host to resample its position embeddings; here they are resampled in the graph.
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
from varlen_graphs.recipes.blocks import siglip_layers
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("embeddings", "encoder", "post_layernorm", "config")


@register("Cosmos3EdgeVisionModel")
def cosmos3_edge(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of Cosmos 3 Edge.

    The encoder is called as the tower is, with `pixel_values` `[rows, 3 * patch * patch]` and `grid_thw` `[items, 3]`,
    and returns the tower's own output type, with `[rows, hidden]` as `last_hidden_state` and `pooler_output`. Each
    frame is one attention segment. Nothing syncs with the host.

    Args:
        tower: `model.model.visual` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Cosmos 3 Edge vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of Cosmos 3 Edge, which is model.model.visual of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    pools = hasattr(tower, "spatial_merge_size")  # of later versions than 5.17, and with it the field `pooler_output`

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, table: ItemTable,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        x = interpolate_positions(
            tower.embeddings.position_embedding.weight,
            table,
            antialias=True,
            order="merge_block",
            add=tower.embeddings.patch_embedding(pixel_values),
        )
        states = list[Tensor]()
        normed = siglip_layers(
            tower.encoder.layers, x, tower.post_layernorm, cu_seqlens, max_seqlen, schedule, attention, states=states
        )
        states_asked = recorded(states, states[-1], output_hidden_states)
        return output_type(last_hidden_state=normed, pooler_output=normed if pools else None, **states_asked)

    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.embeddings.patch_embedding.weight.shape[1],)),
        layout=GridTHW(merge=tower.config.spatial_merge_size),
        buffers=[*attention_buffers(tower.encoder.layers[0].self_attn, "frame"), item_table()],
        outputs=Fields(last_hidden_state=Rows(), hidden_states=Rows(), **({"pooler_output": Rows()} if pools else {})),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)
