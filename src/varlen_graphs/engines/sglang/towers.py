"""Vision towers of SGLang: `(x, grid_thw)` to one tensor `[rows / 4, out]`.

Follows `sglang/srt/models/{qwen2_5_vl,qwen3_vl,glm4v}.py` of 0.5.23, whose submodules it calls by name. What differs
from the towers of transformers is kept: Qwen2.5-VL lets the frames of a video attend to each other outside of windows,
and rounds the angles of its rotation to the dtype of the tower; Qwen3-VL returns deepstack features beside the output,
in one tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import Buffer, GridPositions, WindowIndex, interpolate_positions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.engines.sglang.blocks import run_block, segment_buffers
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Windows
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import patch_convolution
from varlen_graphs.recipes.towers import item_table
from varlen_graphs.recipes.vision_tower import Segments, with_next_norm


class NativeTower(nn.Module):
    """A tower with its own forward, which is called as the engine calls it: with the grid on the CPU.

    Attributes:
        tower: The tower.
        own_forward: The forward of its class, not the hook in its place.
    """

    def __init__(self, tower: nn.Module, own_forward: Callable[..., Any]) -> None:
        super().__init__()
        self.tower: Any = tower
        self.own_forward = own_forward
        self.training = tower.training

    def forward(self, x: Tensor, grid_thw: Tensor) -> Any:
        """Run the tower itself."""
        return self.own_forward(self.tower, x, grid_thw.cpu())


def qwen2_5_vl(
    module: NativeTower, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the tower of Qwen2.5-VL: windows in most layers, whole items in the others."""
    tower = module.tower
    unit, attn = tower.spatial_merge_unit, tower.blocks[0].attn
    window = Windows(tower.window_size // tower.spatial_merge_size // tower.patch_size)

    def forward(
        module: NativeTower, x: Tensor, position_ids: Tensor, window_index: Tensor, reverse_indices: Tensor,
        cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        window_cu_seqlens: Tensor, window_max_seqlen: int, window_schedule: TileSchedule,
    ) -> Tensor:  # fmt: skip
        tower = module.tower
        items = Segments(cu_seqlens, max_seqlen, schedule)
        windows = Segments(window_cu_seqlens, window_max_seqlen, window_schedule)

        def in_windows(rows: Tensor) -> Tensor:
            tokens = rearrange(rows, "(tokens unit) dim -> tokens unit dim", unit=unit)
            return rearrange(tokens[window_index], "tokens unit dim -> (tokens unit) dim")

        x = tower.patch_embed(in_windows(x))
        angles = tower.rotary_pos_emb(in_windows(position_ids)).to(x.dtype)
        rotary = _twice(angles.cos()), _twice(angles.sin())
        normed = tower.blocks[0].norm1(x)
        for index, (block, next_norm) in enumerate(with_next_norm(tower.blocks)):
            segments = items if index in tower.fullatt_block_indexes else windows
            x, normed = run_block(block, x, normed, next_norm, segments=segments, rotary=rotary, backend=attention)
        merged: Tensor = tower.merger(x)[reverse_indices]
        return merged

    buffers = [
        GridPositions(order="merge_block"),
        WindowIndex(window),
        WindowIndex(window, "reverse_indices", inverse=True),
        *segment_buffers(attn, "item"),
        *segment_buffers(attn, window, "window_"),
    ]
    return _encoder(module, budgets, buffers, forward, options)


def qwen3_vl(
    module: NativeTower, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the tower of Qwen3-VL: frames, with deepstack features beside the output."""
    tower = module.tower

    def forward(
        module: NativeTower, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int,
        schedule: TileSchedule, table: ItemTable,
    ) -> Tensor:  # fmt: skip
        tower = module.tower
        x = interpolate_positions(
            tower.pos_embed.weight[: tower.num_position_embeddings],  # the rest is padding of the engine
            table,
            align_corners=True,
            order="merge_block",
            accum_dtype=None,
            add=tower.patch_embed(x),
        )
        frames, rotary = Segments(cu_seqlens, max_seqlen, schedule), _rotary(tower, position_ids)
        deepstack: list[Tensor] = []
        normed = tower.blocks[0].norm1(x)
        for index, (block, next_norm) in enumerate(with_next_norm(tower.blocks)):
            x, normed = run_block(block, x, normed, next_norm, segments=frames, rotary=rotary, backend=attention)
            if index in tower.deepstack_visual_indexes:
                deepstack.append(tower.deepstack_merger_list[len(deepstack)](x))
        return torch.cat([tower.merger(x), *deepstack], 1)

    buffers = [_positions(tower), *segment_buffers(tower.blocks[0].attn, "frame"), item_table()]
    return _encoder(module, budgets, buffers, forward, options)


def glm4v(
    module: NativeTower, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the tower of GLM-4.1V: frames."""
    tower = module.tower

    def forward(
        module: NativeTower, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int,
        schedule: TileSchedule, table: ItemTable,
    ) -> Tensor:  # fmt: skip
        tower = module.tower
        x = interpolate_positions(
            tower.embeddings.position_embedding.weight,
            table,
            mode="bicubic",
            order="merge_block",
            add=tower.post_conv_layernorm(tower.patch_embed(x)),
        )
        frames, rotary = Segments(cu_seqlens, max_seqlen, schedule), _rotary(tower, position_ids)
        normed = tower.blocks[0].norm1(x)
        for block, next_norm in with_next_norm(tower.blocks):
            x, normed = run_block(block, x, normed, next_norm, segments=frames, rotary=rotary, backend=attention)
        side = tower.spatial_merge_size
        blocks = rearrange(tower.post_layernorm(x), "(blocks h w) dim -> blocks (dim h w)", h=side, w=side)
        merged: Tensor = tower.merger(patch_convolution(blocks, tower.downsample))
        return merged

    buffers = [_positions(tower), *segment_buffers(tower.blocks[0].attn, "frame"), item_table()]
    return _encoder(module, budgets, buffers, forward, options)


RECIPES: dict[str, Callable[..., GraphedEncoder]] = {
    "sglang.srt.models.qwen2_5_vl.Qwen2_5_VisionTransformer": qwen2_5_vl,
    "sglang.srt.models.qwen3_vl.Qwen3VLMoeVisionModel": qwen3_vl,
    "sglang.srt.models.glm4v.Glm4vVisionModel": glm4v,
}
"""Recipes by the paths of the classes of towers."""


def _encoder(
    module: NativeTower,
    budgets: Budgets | None,
    buffers: Sequence[Buffer],
    forward: Callable[..., Tensor],
    options: dict[str, Any],
) -> GraphedEncoder:
    """Return the encoder of a tower that takes `x` `[rows, pixels]` and `grid_thw`."""
    tower = module.tower
    spec = BufferSpec(
        rows=InputRows.pixels("x", tower.patch_embed.proj.weight[0].numel(), None),
        layout=GridTHW("grid_thw", merge=tower.spatial_merge_size),
        buffers=buffers,
        outputs=Rows(every=tower.spatial_merge_size**2),
        declared_by="recipe",
    )
    return GraphedEncoder(module, budgets, spec, forward=forward, **options)


def _positions(tower: Any) -> GridPositions:
    """Return the coordinates of rows in the table of the tower's rotation."""
    return GridPositions(order="merge_block", largest=len(tower.rotary_pos_emb.cos_sin_cache))


def _rotary(tower: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Look up cosines and sines, `[rows, head_dim]` each."""
    rope = tower.rotary_pos_emb
    cos, sin = rope.get_cos_sin(len(rope.cos_sin_cache))
    return _twice(cos[position_ids].flatten(1)), _twice(sin[position_ids].flatten(1))


def _twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)
