"""HunYuan-VL: images whose merged lines each end in a learned token, between a learned begin and end.

Follows `transformers/models/hunyuan_vl/modeling_hunyuan_vl.py`, whose submodules it calls by name. The tower reads the
grid on the host to resample its position embeddings and to merge patches image by image; here both are in the graph.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import DeviceBuffer, interpolate_positions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import LayoutError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.outputs.grid_entries import GridEntries
from varlen_graphs.recipes.blocks import patch_convolution, siglip_layers
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("embeddings", "layers", "patch_merger")


@register("HunYuanVLVisionTransformer")
def hunyuan_vl(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of HunYuan-VL.

    The encoder is called as the tower is, with `pixel_values` `[rows, 3 * patch * patch]` and `grid_thw` `[items, 3]`
    of images, and returns the tower's own output type with `last_hidden_state` `[1, rows, hidden]` and `pooler_output`
    `[1, tokens, out]`: an image of `h x w` patches has `h / 2 * (w / 2 + 1) + 2` tokens. The host must know their
    number, so `grid_thw` on the GPU costs one copy to the host.

    Args:
        tower: `model.model.vision_tower` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a HunYuan-VL vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of HunYuan-VL, which is model.model.vision_tower of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    merge: int = tower.patch_merger.spatial_merge_size

    def tokens_of(t: int, h: int, w: int) -> int:
        if t != 1:
            raise LayoutError(
                f"grid_thw has an item {(t, h, w)}: expected images, with t = 1, as the tower takes no videos"
            )
        return h // merge * (w // merge + 1) + 2

    def tokens_at(budget: Budget) -> int:
        return 2 * (budget.rows // merge**2 + budget.items)  # images may be as narrow as a token

    def block_rows(table: ItemTable) -> Tensor:
        return _block_rows(table, merge)

    def token_places(table: ItemTable) -> Tensor:
        return _token_places(table, merge, tokens_at(table.budget))

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, table: ItemTable,
        block_rows: Tensor, token_places: Tensor, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        embeddings = tower.embeddings
        x = interpolate_positions(
            embeddings.position_embedding.weight[1:],
            table,
            mode=embeddings.config.interpolate_mode,
            add=patch_convolution(pixel_values, embeddings.patch_embedding),
        )
        states = list[Tensor]()
        x = siglip_layers(tower.layers, x, None, cu_seqlens, max_seqlen, schedule, attention, states=states)
        tokens = _merge(tower.patch_merger, x, block_rows, token_places)
        states = [state[None] for state in states]
        states_asked = recorded(states, states[-1], output_hidden_states)
        return output_type(last_hidden_state=x[None], pooler_output=tokens[None], **states_asked)

    rows = Rows(rows_dim=1)
    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.embeddings.patch_embedding.weight[0].numel(),)),
        layout=GridTHW(merge=merge),
        buffers=[
            *attention_buffers(tower.layers[0].self_attn, "item"),
            item_table(),
            DeviceBuffer("block_rows", block_rows, any_segments=False),
            DeviceBuffer("token_places", token_places, any_segments=False),
        ],
        outputs=Fields(
            last_hidden_state=rows, pooler_output=GridEntries(tokens_of, tokens_at, rows_dim=1), hidden_states=rows
        ),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _block_rows(table: ItemTable, merge: int) -> Tensor:
    """Return the rows of the square of patches that each merged token is made of, int64 `[blocks, merge * merge]`."""
    block = torch.arange(table.budget.rows // merge**2, device=table.device)
    item = table.row_item[block * merge**2]  # images begin at blocks
    across = (table.row_size[1][block * merge**2] // merge).clamp(min=1)  # padding has sides of 1
    within = block - table.item_starts[item] // merge**2
    y, x = within // across * merge, within % across * merge
    side = torch.arange(merge, device=table.device)
    h, w = (y[:, None] + side)[:, :, None], (x[:, None] + side)[:, None, :]
    rows = table.item_starts[item, None, None] + h * (across * merge)[:, None, None] + w
    return rows.flatten(1).clamp(0, table.budget.rows - 1)


def _token_places(table: ItemTable, merge: int, most: int) -> Tensor:
    """Return the place of each output token among the merged ones, newline, begin and end, int64 `[most]`."""
    blocks = table.budget.rows // merge**2
    lines, across = table.h // merge, table.w // merge
    counts = torch.where(lines > 0, lines * (across + 1) + 2, 0)
    ends = counts.cumsum(0)
    token = torch.arange(most, device=table.device)
    item = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    within = token - (ends - counts)[item] - 1  # -1 is the begin
    line, column = within // (across[item] + 1), within % (across[item] + 1)
    place = table.item_starts[item] // merge**2 + line * across[item] + column
    place = torch.where(column == across[item], blocks, place)
    place = torch.where(within < 0, blocks + 1, place)
    place = torch.where(within == counts[item] - 2, blocks + 2, place)
    return place.clamp(0, blocks + 2)


def _merge(merger: Any, x: Tensor, block_rows: Tensor, token_places: Tensor) -> Tensor:
    """Merge rows `[rows, dim]` to tokens `[tokens, out]`, with the learned ones."""
    blocks = rearrange(merger.before_rms(x)[block_rows], "blocks rows dim -> blocks (dim rows)")
    blocks = patch_convolution(merger.proj_act(patch_convolution(blocks, merger.proj_conv)), merger.proj_out)
    merged = merger.mlp(torch.cat([blocks, merger.image_newline[None].to(blocks.dtype)]))
    ends = torch.stack([merger.image_begin, merger.image_end]).to(merged.dtype)
    tokens: Tensor = merger.after_rms(torch.cat([merged, ends]))[token_places]
    return tokens
