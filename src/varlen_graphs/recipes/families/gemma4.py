"""The vision tower of Gemma 4.

Follows `transformers/models/gemma4/modeling_gemma4.py` of 5.17, 5.23 and 5.24, whose submodules it calls by name.

The tower takes a padded batch of patches with their positions, masks its padding, and pools squares of patches by a
matrix of weights for each image. Here the real patches are packed when they are copied in, attend within their image,
and squares of them are gathered and averaged.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, DeviceBuffer, GridPositions, MaxSeqlen
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.patch_positions import PatchPositions
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries, Rows
from varlen_graphs.recipes.blocks import project_heads
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("patch_embedder", "encoder", "pooler")


@register("Gemma4VisionModel")
def gemma4(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of Gemma 4, for images and for frames of videos.

    The encoder is called as the tower is, with `pixel_values` `[batch, length, 3 * patch * patch]` and
    `pixel_position_ids` `[batch, length, 2]`, the `(x, y)` of each patch, line by line, and (-1, -1) in padding. It
    returns the tower's own output type with `last_hidden_state` `[tokens, hidden]`, the pooled patches of all images,
    and `hidden_states` where a call asks for them, `[batch, length, hidden]` and zero in padding; the last of them is
    `last_hidden_state`.

    Budgets count real patches. Positions on the GPU cost one copy of a few integers to the host.

    Args:
        tower: `model.model.vision_tower` of a whole model.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of Gemma 4's vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of Gemma 4, which is model.model.vision_tower of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling", "BaseModelOutputWithPast")  # the latter in 5.17
    config = tower.config
    square = config.pooling_kernel_size**2

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        positions: Tensor, squares: Tensor, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        x = _embed(tower.patch_embedder, pixel_values, positions)
        cos, sin = (each[0] for each in tower.encoder.rotary_emb(x[None], positions[None]))
        states = [x]
        for layer in tower.encoder.layers[: config.num_hidden_layers]:
            attn = layer.self_attn
            normed, dim = layer.input_layernorm(x), attn.head_dim
            (q,) = project_heads(normed, [attn.q_proj], config.num_attention_heads, dim)
            k, v = project_heads(normed, (attn.k_proj, attn.v_proj), config.num_key_value_heads, dim)
            q, k = _rotate(attn.q_norm(q), attn.k_norm(k), cos, sin)
            attended = varlen_attention(
                q, k, attn.v_norm(v), cu_seqlens, max_seqlen, scale=attn.scaling, schedule=schedule, backend=attention
            )
            change = attn.o_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
            x = x + layer.post_attention_layernorm(change)
            x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
            states.append(x)
        pooled = x[squares].float().mean(1).to(x.dtype).float() * tower.pooler.root_hidden_size
        if config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        pooled = pooled.to(x.dtype)
        return output_type(last_hidden_state=pooled, **recorded(states, pooled, output_hidden_states))

    tokens = Entries(lambda patches: patches // square, lambda budget: budget.rows // square)
    embedder = tower.patch_embedder
    spec = BufferSpec(
        rows=InputRows("pixel_values", (3 * embedder.patch_size**2,), torch.float32),  # scaled before a cast
        layout=PatchPositions("pixel_position_ids", merge=config.pooling_kernel_size),
        buffers=[
            CuSeqlens(per="item"),
            MaxSeqlen(per="item"),
            AttentionSchedule(config.num_attention_heads, config.head_dim, per="item"),
            GridPositions("positions", axes=("w", "h"), largest=embedder.position_embedding_size),
            DeviceBuffer("squares", _squares, any_segments=False),
        ],
        outputs=Fields(last_hidden_state=tokens, hidden_states=[*[Rows()] * config.num_hidden_layers, tokens]),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _embed(embedder: Any, pixels: Tensor, positions: Tensor) -> Tensor:
    """Embed patches `[rows, pixels]` and their positions `(x, y)`, `[rows, hidden]`; pixels are between 0 and 1."""
    weight, table = embedder.input_proj.weight, embedder.position_embedding_table
    pixels = 2 * (pixels - 0.5)
    x = embedder.input_proj(pixels.to(weight.dtype) if weight.dtype.is_floating_point else pixels)
    embedded: Tensor = x + (F.embedding(positions[:, 0], table[0]) + F.embedding(positions[:, 1], table[1]))
    return embedded


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of each head, by column and by row, each as a head of its own."""
    parts = [each.chunk(2, -1) for each in (q, k, cos, sin)]
    halves = [apply_rotary(*own) for own in zip(*parts, strict=True)]
    queries, keys = (torch.cat(own, -1) for own in zip(*halves, strict=True))
    return queries, keys


def _squares(table: ItemTable) -> Tensor:
    """Return the rows of the patches of each square that is pooled, int64 `[squares, patches]`."""
    _, y, x = table.positions("merge_block")
    row = table.item_starts[table.row_item] + y * table.w[table.row_item] + x
    row = torch.where(table.row_active, row, torch.arange(len(row), device=row.device))
    return row.view(-1, table.layout.row_multiple)
