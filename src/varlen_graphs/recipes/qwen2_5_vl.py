"""Qwen2.5-VL and the vision tower of Qwen2.5-Omni: images and videos, most layers of which attend within windows.

Follows `transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17 and 5.23, and in Omni, but for its three projections. Where the versions differ (the output type), the recipe
does what the installed one does.

Rows are put into window order once, at the start. A window is a segment there, and a frame is one still, so both kinds
of layers run on the same rows. The merged tokens are put back in the end.
"""

from typing import Any

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend as Backend
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, MaxSeqlen, RotaryTable, WindowIndex
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layout.budgets import Budgets, Ladder
from varlen_graphs.layout.grids import GridTHW
from varlen_graphs.layout.segments import Windows
from varlen_graphs.recipes.blocks import add_norm, patch_convolution, project_heads, rms_norm, split_heads, swiglu
from varlen_graphs.recipes.registry import handles
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.entries import Rows
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.outputs import Declared, Outputs
from varlen_graphs.spec.rows import PackedRows

PARTS = (
    "patch_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size", "spatial_merge_unit", "patch_size",
    "window_size", "fullatt_block_indexes",
)  # fmt: skip


@handles("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5OmniVisionEncoder")
def qwen2_5_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: Backend = "auto",
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen2.5-VL or Qwen2.5-Omni.

    The encoder takes what the tower takes, `(hidden_states, grid_thw)`, and gives what it gives: the tower's own output
    type with `pooler_output` `[rows / 4, out]` in the order of the call and `last_hidden_state` `[rows, hidden]` in
    window order, or with transformers 4.57 the former alone.

    Args:
        tower: `model.model.visual` of a whole model, or `model.thinker.visual` of an Omni model.
        budgets: As for `GraphedEncoder`; every window takes a segment. `None` is `Ladder()` with a segment for every
            quarter of a window (16 rows, for windows of 8 x 8 patches): as many as any images need whose sides are at
            least half a window, 56 pixels.
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
        "the vision tower of Qwen2.5-VL or Qwen2.5-Omni, which is model.model.visual of a whole model "
        "(model.thinker.visual for Omni)",
    )
    made = output_class(tower, "BaseModelOutputWithPooling")
    windows = Windows(tower.window_size // tower.spatial_merge_size // tower.patch_size)
    merged = Rows(every=tower.spatial_merge_unit)
    outputs: Declared = merged  # transformers 4.57
    if made is not None:
        outputs = Outputs(last_hidden_state=Rows(), pooler_output=merged)

    def forward(
        tower: Any,
        hidden_states: Tensor,
        window_index: Tensor,
        reverse_indices: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        schedule: TileSchedule,
        cu_window_seqlens: Tensor,
        max_window_seqlen: int,
        window_schedule: TileSchedule,
    ) -> Any:
        tokens = rearrange(hidden_states, "(tokens unit) pixels -> tokens unit pixels", unit=tower.spatial_merge_unit)
        x = patch_convolution(
            rearrange(tokens[window_index], "tokens unit pixels -> (tokens unit) pixels"), tower.patch_embed.proj
        )
        normed = rms_norm(x, tower.blocks[0].norm1)
        for index, block in enumerate(tower.blocks):
            # Read from the tower: numbers of a closure are symbols to the compiler.
            if index in tower.fullatt_block_indexes:
                segments, longest, tiles = cu_seqlens, max_seqlen, schedule
            else:
                segments, longest, tiles = cu_window_seqlens, max_window_seqlen, window_schedule
            q, k, v = _project(block.attn, normed)
            q, k = apply_rotary(q, k, *position_embeddings)
            attended = varlen_attention(
                q, k, v, segments, longest, scale=block.attn.scaling, schedule=tiles, backend=attention
            )
            change = block.attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
            x, normed = add_norm(x, change, block.norm2)
            change = swiglu(normed, block.mlp)
            if index + 1 < len(tower.blocks):
                x, normed = add_norm(x, change, tower.blocks[index + 1].norm1)
            else:
                x = x + change
        pooled = tower.merger(x)[reverse_indices]
        return pooled if made is None else made(last_hidden_state=x, pooler_output=pooled)

    attn = tower.blocks[0].attn
    sizes = {"heads": attn.num_heads, "head_dim": attn.head_dim}
    spec = BufferSpec(
        rows=PackedRows.pixels("hidden_states", tower.patch_embed.proj.weight[0].numel(), normalize),
        layout=GridTHW("grid_thw", merge=tower.spatial_merge_size),
        buffers=[
            WindowIndex(windows),
            WindowIndex(windows, "reverse_indices", inverse=True),
            RotaryTable(order=windows),
            CuSeqlens(per="frame"),
            MaxSeqlen(per="frame"),
            AttentionSchedule(**sizes, per="frame"),
            CuSeqlens("cu_window_seqlens", per=windows),
            MaxSeqlen("max_window_seqlen", per=windows),
            AttentionSchedule(**sizes, name="window_schedule", per=windows),
        ],
        outputs=outputs,
    )
    if budgets is None:
        quarter = max(1, windows.side**2 * tower.spatial_merge_unit // 4)
        budgets = Ladder(rows_per_segment=quarter)
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _project(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[rows, heads, dim]`, of one projection or, in Omni, of three."""
    if hasattr(attn, "qkv"):
        return split_heads(attn.qkv(x), attn.num_heads, attn.head_dim)
    q, k, v = project_heads(x, (attn.q, attn.k, attn.v), attn.num_heads, attn.head_dim)
    return q, k, v
