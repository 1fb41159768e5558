"""Qwen2-VL: images and videos, without windows, position embeddings or deepstack features.

Follows `transformers/models/qwen2_vl/modeling_qwen2_vl.py`, whose submodules it calls by name; they are the same in
4.57, 5.17 and 5.23. Where the versions differ (the output type), the recipe does what the installed one does.
"""

from typing import Any

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend as Backend
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, MaxSeqlen, RotaryTable
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layout.budgets import Budgets, Ladder
from varlen_graphs.layout.grids import GridTHW
from varlen_graphs.recipes.blocks import add_norm, linear_activation, patch_convolution, split_heads
from varlen_graphs.recipes.registry import handles
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.entries import Rows
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.outputs import Declared, Outputs
from varlen_graphs.spec.rows import PackedRows

PARTS = ("patch_embed", "rotary_pos_emb", "blocks", "merger", "spatial_merge_size")


@handles("Qwen2VisionTransformerPretrainedModel")
def qwen2_vl(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: Backend = "auto",
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph the vision tower of Qwen2-VL.

    The encoder takes what the tower takes, `(hidden_states, grid_thw)`, and gives what it gives: the tower's own output
    type with `last_hidden_state` `[rows, hidden]` and `pooler_output` `[rows / 4, out]`, or with transformers 4.57 the
    latter alone. A frame is one attention segment.

    Args:
        tower: `model.model.visual` of a whole model.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`.
        attention: The attention backend.
        normalize: With this, rows are bytes, as processors give them with `do_rescale=False, do_normalize=False` and
            `.to(torch.uint8)`, and are normalised inside the graph.
        **options: Further arguments of `GraphedEncoder`.

    Raises:
        SpecError: `tower` lacks the parts of such a tower.
    """
    check_parts(tower, PARTS, "the vision tower of Qwen2-VL, which is model.model.visual of a whole model")
    made = output_class(tower, "BaseModelOutputWithPooling")
    merged = Rows(every=tower.spatial_merge_size**2)
    outputs: Declared = merged  # transformers 4.57
    if made is not None:
        outputs = Outputs(last_hidden_state=Rows(), pooler_output=merged)

    def forward(
        tower: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        schedule: TileSchedule,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> Any:
        x = patch_convolution(hidden_states, tower.patch_embed.proj)
        normed = tower.blocks[0].norm1(x)
        for index, block in enumerate(tower.blocks):
            q, k, v = split_heads(block.attn.qkv(normed), block.attn.num_heads, block.attn.head_dim)
            q, k = apply_rotary(q, k, *position_embeddings)
            attended = varlen_attention(
                q, k, v, cu_seqlens, max_seqlen, scale=block.attn.scaling, schedule=schedule, backend=attention
            )
            change = block.attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
            x, normed = add_norm(x, change, block.norm2)
            change = block.mlp.fc2(linear_activation(normed, block.mlp.fc1, block.mlp.act))
            if index + 1 < len(tower.blocks):
                x, normed = add_norm(x, change, tower.blocks[index + 1].norm1)
            else:
                x = x + change
        pooled = tower.merger(x)
        return pooled if made is None else made(last_hidden_state=x, pooler_output=pooled)

    attn = tower.blocks[0].attn
    spec = BufferSpec(
        rows=PackedRows.pixels("hidden_states", tower.patch_embed.proj.weight[0].numel(), normalize),
        layout=GridTHW("grid_thw", merge=tower.spatial_merge_size),
        buffers=[
            CuSeqlens(per="frame"),
            MaxSeqlen(per="frame"),
            AttentionSchedule(heads=attn.num_heads, head_dim=attn.head_dim, per="frame"),
            RotaryTable(order="merge_block"),
        ],
        outputs=outputs,
    )
    return GraphedEncoder(tower, Ladder() if budgets is None else budgets, spec, forward=forward, **options)
