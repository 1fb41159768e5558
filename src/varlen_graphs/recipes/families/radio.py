"""C-RADIO, as in Nemotron Omni: packed images of any size, with class tokens and registers, and batches of one size.

Follows `transformers/models/radio/modeling_radio.py`, whose submodules it calls by name. The tower reads the grid on
the host to resample and crop its position embeddings image by image, and to attend; here both are in the graph. Images
and videos that come as a batch of one size run the tower's own forward.
"""

import inspect
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, DeviceBuffer, MaxSeqlen, PrefixIndex
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.recipes.automatic.by_batch import by_batch
from varlen_graphs.recipes.blocks import project_heads
from varlen_graphs.recipes.families.packed_or_batch import PackedOrBatch
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import check_parts, item_table, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded

PARTS = ("input_conditioner", "embeddings", "encoder", "summary_idxs", "config")

Taps = tuple[Tensor, Tensor]
"""Entries of the position table that each row is made of, int64 `[rows, 4]`, and their weights, float32."""


@register("RadioModel")
def radio(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph C-RADIO, the vision tower of Nemotron Omni.

    The encoder is called as the tower is. With `pixel_values` `[rows, 3 * patch * patch]` and `image_grid_hw`
    `[images, 2]`, it returns the tower's own output type with `summary` `[images, ...]`, `features` `[rows, hidden]`
    and `last_hidden_state`, which has the class tokens and registers before the rows of each image. Nothing syncs with
    the host. Without `image_grid_hw`, `pixel_values` are a batch of images or videos of one size, for which
    `encoder.batches` has graphs, see `by_batch`. Up to transformers 5.17 the tower takes batches alone.

    Args:
        tower: `model.vision_model` of a whole model.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow. Those of
            batches are those of `by_batch`.
        attention: The attention backend of packed images.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of C-RADIO.
    """
    check_parts(tower, PARTS, "C-RADIO, which is model.vision_model of Nemotron Omni")
    if "image_grid_hw" not in inspect.signature(tower.forward).parameters:
        return by_batch(tower, budgets, **options)
    output_type = output_class(tower, "RadioModelOutput")
    prefix, attn = len(tower.embeddings.cls_register_token), tower.encoder.layer[0].attention

    def taps(table: ItemTable) -> Taps:
        return _taps(table, tower.embeddings.max_rows)

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, taps: Taps,
        prefix_index: Tensor, table: ItemTable, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        x = _embed(tower, pixel_values, taps, prefix_index)
        images, states = Segments(cu_seqlens, max_seqlen, schedule), [x[None]]
        for layer in tower.encoder.layer:
            x = x + layer.layer_scale1(_attend(layer.attention, layer.norm1(x), images, attention))
            x = x + layer.layer_scale2(layer.mlp(layer.norm2(x)))
            states.append(x[None])
        summary = x[table.prefix_places[:, tower.summary_idxs]].flatten(1)
        states_asked = recorded(states, states[-1], output_hidden_states)
        return output_type(summary=summary, features=x, last_hidden_state=x, **states_asked)

    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.embeddings.patch_projection.weight.shape[1],)),
        layout=GridHW("image_grid_hw", prefix=prefix),
        buffers=[
            CuSeqlens(),
            MaxSeqlen(),
            AttentionSchedule(attn.num_attention_heads, attn.head_dim),
            DeviceBuffer("taps", taps, any_segments=False),
            PrefixIndex(),
            item_table(),
        ],
        outputs=Fields(
            summary=Items(),
            features=Rows(prefix="dropped"),
            last_hidden_state=Rows(prefix="kept"),
            hidden_states=Rows(rows_dim=1, prefix="kept"),
        ),
        declared_by="recipe",
    )
    return PackedOrBatch(tower, budgets, spec, forward=forward, **options)


def _taps(table: ItemTable, side: int) -> Taps:
    """Return the taps of a bilinear resampling of the table to a square, from which each image is cropped."""
    _, h, w = table.positions("raster")
    longest = torch.maximum(*table.row_size)
    source = (torch.stack([h, w]) + 0.5) * side / longest - 0.5
    low = source.floor()
    weights = torch.stack([1 - (source - low), source - low], dim=-1)
    places = (low[..., None] + torch.arange(2, device=table.device)).long().clamp(0, side - 1)
    indices = places[0, :, :, None] * side + places[1, :, None, :]
    return indices.flatten(1), (weights[0, :, :, None] * weights[1, :, None, :]).flatten(1)


def _embed(tower: Any, patches: Tensor, taps: Taps, prefix_index: Tensor) -> Tensor:
    """Embed patches with their positions, and put the class tokens and registers before those of each image."""
    parts, size = tower.embeddings, tower.config.patch_size
    pixels = tower.input_conditioner(patches.view(-1, tower.config.num_channels, size, size))
    table, positions = parts.position_embedding[0], torch.zeros((), device=patches.device)
    for indices, weights in zip(taps[0].unbind(1), taps[1].unbind(1), strict=True):
        positions = positions + table[indices].float() * weights[:, None]
    x = parts.patch_projection(pixels.flatten(1))
    return torch.cat([x + positions.to(x.dtype), parts.cls_register_token.to(x.dtype)])[prefix_index]


def _attend(attn: Any, x: Tensor, images: Segments, backend: AttentionBackend) -> Tensor:
    q, k, v = project_heads(x, (attn.q_proj, attn.k_proj, attn.v_proj), attn.num_attention_heads, attn.head_dim)
    attended = varlen_attention(
        q, k, v, images.cu_seqlens, images.max_seqlen, scale=attn.scaling, schedule=images.schedule, backend=backend
    )
    out: Tensor = attn.o_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
    return out
