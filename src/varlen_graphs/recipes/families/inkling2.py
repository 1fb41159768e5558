"""Inkling 2: images with class tokens, merged for the language model.

Follows `transformers/models/inkling2/modeling_inkling2.py`, whose submodules it calls by name. The tower of Inkling 2
computes class tokens, positions and segments on the host; here they are in the graph, and its own layers attend by
`varlen_attention`. The tower of Inkling, without attention, needs no recipe: each patch is an item of a batch.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import interpolate_positions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries, Rows
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("embeddings", "pre_layernorm", "rotary_emb", "layers", "merger")


@register("Inkling2VisionModel")
def inkling2(tower: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph the vision tower of Inkling 2.

    The encoder is called as the tower is, with `pixel_values` `[tokens, side, side, channels]`, an entry for each token
    of the language model, and `image_grid_thw` `[images, 3]` in tokens. It returns the tower's own output type with
    `last_hidden_state` `[patches + images, hidden]`, a class token before the patches of each image, and
    `pooler_output` `[tokens, out]`. The host must know the images, so `image_grid_thw` on the GPU costs one copy to the
    host.

    Args:
        tower: `model.model.vision_tower` of a whole model.
        budgets: As for `GraphedEncoder`, in tokens; `None` is `Ladder()`, as far as memory and time allow.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of an Inkling 2 vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of Inkling 2, which is model.model.vision_tower of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    merge, size = tower.embeddings.merge_size, tower.embeddings.patch_size
    channels = tower.embeddings.patch_embedding.in_features // size**2

    def forward(tower: Any, pixel_values: Tensor, table: ItemTable, output_hidden_states: Any = None) -> Any:
        from varlen_graphs.attention.transformers import use_attention

        patches = _patches(table, merge)
        x, positions = _embed(tower, pixel_values, patches)
        x = tower.pre_layernorm(x)
        attends = {
            "cu_seqlens": patches.cu_seqlens("item"),
            "max_seqlen": patches.max_seqlen("item"),
            "position_embeddings": tower.rotary_emb(x, positions),
        }
        states = [x]
        with use_attention(tower):
            for layer in tower.layers:
                x = layer(x, **attends)
                states.append(x)
        tokens = rearrange(x[patches.row_places], "(tokens patches) dim -> tokens (patches dim)", patches=merge**2)
        states_asked = recorded(states, x, output_hidden_states)
        return output_type(last_hidden_state=x, pooler_output=tower.merger(tokens), **states_asked)

    entries = Entries(lambda tokens: tokens * merge**2 + 1, lambda budget: budget.rows * merge**2 + budget.items)
    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(merge * size, merge * size, channels)),
        layout=GridTHW("image_grid_thw"),
        buffers=[item_table()],
        outputs=Fields(last_hidden_state=entries, pooler_output=Rows(), hidden_states=entries),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _patches(table: ItemTable, merge: int) -> ItemTable:
    """Return the table of the patches that tokens are merged of, behind a class token an image."""
    budget, rows = table.budget, table.budget.rows * merge**2
    of_patches = Budget(rows, budget.items, budget.items, rows)  # no buffer counts the longest image
    sides = torch.tensor([1, merge, merge], device=table.device)
    return ItemTable(table.values * sides, of_patches, GridTHW(merge=merge, prefix=1))


def _embed(tower: Any, pixel_values: Tensor, patches: ItemTable) -> tuple[Tensor, Tensor]:
    """Return class tokens and embedded patches, `[entries, hidden]`, and their places, int64 `[entries, 2]`."""
    parts = tower.embeddings
    merge, size = parts.merge_size, parts.patch_size
    rows = rearrange(
        pixel_values, "tokens (y h) (x w) channels -> (tokens y x) (h w channels)", y=merge, x=merge, h=size, w=size
    )
    embedded = interpolate_positions(
        parts.position_embedding.weight, patches, order="merge_block", add=parts.patch_embedding(rows)
    )
    first = (parts.class_embedding + parts.cls_position_embedding).to(embedded.dtype)
    x = first.repeat(patches.rows_with_prefix, 1).index_copy(0, patches.row_places, embedded)
    _, h, w = patches.positions("merge_block")
    positions = h.new_zeros(len(x), 2).index_copy(0, patches.row_places, torch.stack([h + 1, w + 1], 1))
    return x, positions
