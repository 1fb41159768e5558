"""Parts that the recipes of the Qwen and GLM vision towers share: declaration and transformer blocks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.buffers import Buffer
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared
from varlen_graphs.recipes.blocks import add_norm, project_heads, split_heads


class Segments(NamedTuple):
    """Segments of rows that attend to themselves, and the tile schedule of the attention over them."""

    cu_seqlens: Tensor
    max_seqlen: int
    schedule: TileSchedule


def vision_spec(
    tower: Any, buffers: Sequence[Buffer], outputs: Declared, normalize: Normalize | Patches | None = None
) -> BufferSpec:
    """Return the declaration of a tower that takes `hidden_states` `[rows, pixels]` and `grid_thw` `[items, 3]`."""
    return BufferSpec(
        rows=InputRows.pixels("hidden_states", tower.patch_embed.proj.weight[0].numel(), normalize),
        layout=GridTHW("grid_thw", merge=tower.spatial_merge_size),
        buffers=buffers,
        outputs=outputs,
        declared_by="recipe",
    )


def recorded(states: Sequence[Tensor], last: Tensor, asked: Any) -> dict[str, Any]:
    """Return the field `hidden_states` of an output, as transformers records it; nothing if no call asks for it.

    `states` are those before and after each block; the tower's `last_hidden_state` takes the place of the last. `asked`
    may be an index or several: the states of other layers are then `None`.
    """
    if not asked:
        return {}
    layers: list[Tensor | None] = [*states[:-1], last]
    if not isinstance(asked, bool):
        count, indices = len(layers), [asked] if isinstance(asked, int) else asked
        chosen = {index % count for index in indices if -count <= index < count}  # others select nothing
        layers = [state if index in chosen else None for index, state in enumerate(layers)]
    return {HIDDEN_STATES: tuple(layers)}


def with_next_norm(blocks: Sequence[Any], last: Any = None) -> Iterator[tuple[Any, Any]]:
    """Pair each block with the norm after it: `norm1` of the next block, `last` after the last block."""
    return zip(blocks, [*(block.norm1 for block in blocks[1:]), last], strict=True)


def run_block(
    block: Any,
    x: Tensor,
    normed: Tensor,
    next_norm: Any,
    mlp: Callable[[Tensor, Any], Tensor],
    *,
    segments: Segments,
    rotary: tuple[Tensor, Tensor] | None = None,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Run one block: attention, with rotary embeddings if there are any, then the MLP, each added to `x`.

    Every addition is fused with the norm that follows it: `normed` is `block.norm1(x)`, and the output of the block
    comes with `next_norm` of it, `[rows, dim]` each. `mlp` is called as `mlp(x, block.mlp)`.
    """
    x, normed = add_norm(x, _attend(block.attn, normed, segments, rotary, backend), block.norm2)
    return add_norm(x, mlp(normed, block.mlp), next_norm)


def _attend(
    attn: Any, x: Tensor, segments: Segments, rotary: tuple[Tensor, Tensor] | None, backend: AttentionBackend
) -> Tensor:
    # A function of its own: its intermediate tensors are freed before the MLP, which reuses their memory.
    q, k, v = _query_key_value(attn, x)
    if rotary is not None:
        q, k = apply_rotary(q, k, *rotary)
    cu_seqlens, max_seqlen, schedule = segments
    attended = varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, schedule=schedule, backend=backend)
    out: Tensor = attn.proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
    return out


def _query_key_value(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project rows to `[rows, heads, dim]` each: three projections in Qwen2.5-Omni, query and key norms in GLM-OCR."""
    if hasattr(attn, "qkv"):
        q, k, v = split_heads(attn.qkv(x), attn.num_heads, attn.head_dim)
    else:
        q, k, v = project_heads(x, (attn.q, attn.k, attn.v), attn.num_heads, attn.head_dim)
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    return q, k, v
