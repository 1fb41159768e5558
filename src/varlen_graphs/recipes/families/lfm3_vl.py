"""LFM3-VL: images and videos through gated convolutions over the grid of each frame, and attention in some layers.

Follows `transformers/models/lfm3_vl/modeling_lfm3_vl.py`, whose submodules it calls by name. The tower reads the grid
on the host to convolve frame by frame. Here each row gathers its neighbours by an index that the graph computes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import DeviceBuffer, RotaryTable
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import add_norm, is_plain
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import Segments, recorded

PARTS = ("patch_embed", "embedding_norm", "rotary_pos_emb", "layers", "spatial_merge_size", "config")


@register("Lfm3VlVisionModel")
def lfm3_vl(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of LFM3-VL.

    The encoder is called as the tower is, with `pixel_values` `[rows, pixels]` and `grid_thw` `[items, 3]`, and returns
    the tower's own output type with `last_hidden_state` `[rows, hidden]`. Each frame is one attention segment, and is
    convolved alone. Nothing syncs with the host.

    Args:
        tower: `model.model.vision_tower` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of an LFM3-VL vision tower.
    """
    check_parts(tower, PARTS, "the vision tower of LFM3-VL, which is model.model.vision_tower of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    kernel = tower.config.conv_kernel_size

    def neighbours(table: ItemTable) -> Tensor:
        return _neighbours(table, kernel)

    def forward(
        tower: Any, pixel_values: Tensor, neighbours: Tensor, cu_seqlens: Any = None, max_seqlen: Any = None,
        schedule: Any = None, position_embeddings: Any = None, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        frames = Segments(cu_seqlens, max_seqlen, schedule)
        x = tower.embedding_norm(tower.patch_embed(pixel_values))
        states = [x]
        normed = tower.layers[0].operator_norm(x)
        for layer, next_norm in zip(
            tower.layers, [*(layer.operator_norm for layer in tower.layers[1:]), None], strict=True
        ):
            if layer.is_attention_layer:
                change = _attend(layer.self_attn, normed, frames, position_embeddings, attention)
            else:
                change = _convolve(layer.conv, normed, neighbours)
            x, normed = add_norm(x, change, layer.ffn_norm)
            x, normed = add_norm(x, layer.feed_forward(normed), next_norm)
            states.append(x)
        return output_type(last_hidden_state=x, **recorded(states, x, output_hidden_states))

    attending = [layer.self_attn for layer in tower.layers if layer.is_attention_layer]  # may all be convolutions
    of_attention = [*attention_buffers(attending[0], "frame"), RotaryTable(order="merge_block")] if attending else []
    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(tower.patch_embed.weight.shape[1],)),
        layout=GridTHW(merge=tower.spatial_merge_size),
        buffers=[*of_attention, DeviceBuffer("neighbours", neighbours, any_segments=False)],
        outputs=Fields(last_hidden_state=Rows(), hidden_states=Rows()),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _neighbours(table: ItemTable, kernel: int) -> Tensor:
    """Return the rows under the kernel around each row, int64 `[rows, kernel, kernel]`.

    Places outside of the frame have the number of rows of the budget.
    """
    merge = table.layout.merge
    t, h, w = table.positions("merge_block")
    height, width = (side[:, None, None] for side in table.row_size)
    step = torch.arange(kernel, device=table.device) - kernel // 2
    y, x = (h[:, None] + step)[:, :, None], (w[:, None] + step)[:, None, :]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    block = y // merge * (width // merge) + x // merge
    frame = (table.item_starts[table.row_item] + t * table.h[table.row_item] * table.w[table.row_item])[:, None, None]
    rows = frame + block * merge**2 + y % merge * merge + x % merge
    most = table.budget.rows
    return torch.where(inside, rows.clamp(0, most - 1), most)


def _convolve(conv: Any, x: Tensor, neighbours: Tensor) -> Tensor:
    """Run a gated convolution over rows `[rows, dim]`; outside of the frame are zeros."""
    input_gate, output_gate, values = conv.in_proj(x).chunk(3, dim=-1)
    gated, spatial = F.pad(input_gate * values, (0, 0, 0, 1)), conv.spatial_conv
    if is_plain(spatial, nn.Conv2d):
        convolved = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for taps, weight in zip(neighbours.flatten(1).unbind(1), spatial.weight.flatten(1).unbind(1), strict=True):
            convolved = torch.addcmul(convolved, gated[taps].float(), weight.float())
    else:  # an adapter sees each row in the middle of its neighbours
        middle = neighbours.shape[-1] // 2
        convolved = spatial(rearrange(gated[neighbours], "rows h w dim -> rows dim h w"))[:, :, middle, middle]
    out: Tensor = conv.out_proj(output_gate * convolved.to(gated.dtype))
    return out


def _attend(attn: Any, x: Tensor, frames: Segments, rotary: tuple[Tensor, Tensor], backend: AttentionBackend) -> Tensor:
    """Attend within frames; query heads share key heads, and both are normed."""
    q, k, v = (
        rearrange(project(x), "rows (heads dim) -> rows heads dim", dim=attn.head_dim)
        for project in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k = apply_rotary(attn.q_norm(q), attn.k_norm(k), *rotary)
    attended = varlen_attention(
        q, k, v, frames.cu_seqlens, frames.max_seqlen, scale=attn.scaling, schedule=frames.schedule, backend=backend
    )
    out: Tensor = attn.out_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
    return out
