"""VideoLLaMA 3: images and videos, each merged by its own size at the end of the tower.

Follows `transformers/models/video_llama_3/modeling_video_llama_3.py`, whose submodules it calls by name; they are the
same in 4.57, 5.17, 5.23 and 5.24. The tower merges patches item by item, by resampling. To a size that divides the
grid, this is the mean of the patches in the middle of each square, and the graph takes it for all items at once.
"""

from typing import Any

import torch
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import DeviceBuffer
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import LayoutError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.outputs.grid_entries import GridEntries
from varlen_graphs.recipes.blocks import patch_convolution, siglip_layers
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("embeddings", "encoder", "post_layernorm", "rotary_pos_emb")
MERGE = "merge_sizes"


@register("VideoLlama3VisionModel")
def video_llama3(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of VideoLLaMA 3.

    The encoder is called as the tower is, with `pixel_values` `[rows, 3 * patch * patch]`, `grid_thw` `[items, 3]` and
    `merge_sizes` `[items]`, and returns the tower's own output type with `last_hidden_state` `[tokens, hidden]`, a
    token for each square of `merge_size x merge_size` patches. Each frame is one attention segment. The host must know
    the number of tokens, so `grid_thw` and `merge_sizes` on the GPU cost one copy to the host each.

    Args:
        tower: `model.model.vision_model` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a VideoLLaMA 3 vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of VideoLLaMA 3, which is model.model.vision_model of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling", "BaseModelOutput")  # the latter in 4.57

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        positions: Tensor, middle_rows: Tensor,
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        x = patch_convolution(pixel_values, tower.embeddings.patch_embedding)
        angles = (positions[..., None] * tower.rotary_pos_emb.inv_freq.float()).flatten(1).repeat(1, 2)
        states = list[Tensor]()
        normed = siglip_layers(
            tower.encoder.layers, x, tower.post_layernorm, cu_seqlens, max_seqlen, schedule, attention,
            rotary=(angles.cos(), angles.sin()), states=states,
        )  # fmt: skip
        merged = normed[middle_rows].float().mean(1).to(normed.dtype)
        return output_type(last_hidden_state=merged, **recorded(states, states[-1], output_hidden_states))

    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.embeddings.patch_embedding.weight[0].numel(),)),
        layout=GridTHW(columns=(Column(MERGE, pad=1),)),
        buffers=[
            *attention_buffers(tower.encoder.layers[0].self_attn, "frame"),
            DeviceBuffer("positions", _positions, any_segments=False),
            DeviceBuffer("middle_rows", _middle_rows, any_segments=False),
        ],
        outputs=Fields(last_hidden_state=GridEntries(_tokens, lambda budget: budget.rows), hidden_states=Rows()),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _tokens(t: int, h: int, w: int, merge: int) -> int:
    """Return the number of tokens of an item."""
    if merge < 1 or h % merge or w % merge:
        raise LayoutError(
            f"grid_thw has an item {(t, h, w)} with {MERGE} {merge}: expected a size of at least 1 that divides h and w"
        )
    return t * (h // merge) * (w // merge)


def _positions(table: ItemTable) -> Tensor:
    """Return height and width of each row in its frame, int64 `[rows, 2]`; rows come square by square."""
    merge = table.column(MERGE).clamp(min=1)[table.row_item]
    h, w = table.row_size
    square, within = table.row_in_item % (h * w) // merge**2, table.row_in_item % merge**2
    across = (w // merge).clamp(min=1)
    return torch.stack([square // across * merge + within // merge, square % across * merge + within % merge], dim=1)


def _middle_rows(table: ItemTable) -> Tensor:
    """Return the rows in the middle of each square, int64 `[rows, 4]`: the same one four times if its side is odd."""
    merge = table.column(MERGE).clamp(min=1)
    tokens = table.item_rows // merge**2
    ends = tokens.cumsum(0)
    item = torch.searchsorted(ends, table.row, right=True).clamp(max=len(ends) - 1)
    side = merge[item, None]
    middle = torch.cat([(side - 1) // 2, side // 2], dim=1)
    within = (middle[:, :, None] * side[:, :, None] + middle[:, None, :]).flatten(1)
    first = table.item_starts[item] + (table.row - (ends - tokens)[item]) * merge[item] ** 2
    return (first[:, None] + within).clamp(0, table.budget.rows - 1)
