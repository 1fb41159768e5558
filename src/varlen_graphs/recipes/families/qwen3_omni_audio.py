"""The audio tower of Qwen3-Omni.

Follows `transformers/models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`, whose submodules it calls by name; they are the
same in 4.57, 5.17, 5.23 and 5.24.

Clips of mel frames are cut into chunks, three convolutions turn every eight frames of a chunk into a token, and tokens
attend to those of their window, which spans several chunks of the clip. (In transformers 4.57 only FlashAttention 2
separates windows; its other backends mask nothing. The recipe always separates them.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, tile_schedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder
from varlen_graphs.buffers import DeviceBuffer
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries
from varlen_graphs.recipes.blocks import linear_activation, whisper_layers
from varlen_graphs.recipes.clips import ClipCuts
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import check_parts, output_class, sets_field

PARTS = (
    "conv2d1", "conv2d2", "conv2d3", "conv_out", "positional_embedding", "layers", "ln_post", "proj1", "act", "proj2",
    "n_window", "n_window_infer", "conv_chunksize",
)  # fmt: skip


@register("Qwen3OmniMoeAudioEncoder")
def qwen3_omni_audio(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the audio tower of Qwen3-Omni.

    The encoder is called as the tower is, with `input_features` `[mel_bins, frames]` of all concatenated clips and
    `feature_lens` `[clips]` in frames, and returns the tower's own output type with the tokens of all clips as
    `last_hidden_state` `[tokens, out]`. If that type has a field `pooler_output`, which transformers 5.17 leaves empty,
    it holds the tokens too. The host must know the number of tokens, so `feature_lens` on the GPU cost one copy to the
    host.

    Args:
        tower: `Qwen3OmniMoeAudioEncoder`: `model.thinker.model.audio_tower` of a whole model (up to transformers 5.17
            `model.thinker.audio_tower`).
        budgets: As for `GraphedEncoder`, in frames. `None` is `Ladder()` with room for `max(4, rows // 512)` clips. The
            last chunk of every clip is convolved at full size, so each clip of capacity costs a chunk.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Qwen3-Omni audio tower.
    """
    check_parts(
        tower, PARTS, "the audio tower of Qwen3-Omni, which is model.thinker.model.audio_tower of a whole model"
    )
    output_type = output_class(tower, "BaseModelOutputWithPooling", "BaseModelOutput")  # the latter in 4.57
    fields = [name for name in ("last_hidden_state", "pooler_output") if sets_field(tower, name)]
    attn = tower.layers[0].self_attn
    cuts = ClipCuts(2 * tower.n_window, tower.n_window_infer // (2 * tower.n_window))

    def windows(table: ItemTable) -> tuple[Tensor, TileSchedule]:
        cu_seqlens = cuts.cu_seqlens(table)
        tokens = cuts.tokens_at(table.budget)
        return cu_seqlens, tile_schedule(
            cu_seqlens, cuts.window, rows=tokens, heads=attn.num_heads, head_dim=attn.head_dim
        )

    def forward(
        tower: Any, input_features: Tensor, chunk_frames: tuple[Tensor, Tensor], longest_chunk: Tensor,
        token_places: Tensor, windows: tuple[Tensor, TileSchedule],
    ) -> Any:  # fmt: skip
        frames, real = chunk_frames
        chunks = torch.where(real, input_features[:, frames], 0)  # no product with 0: padding may hold NaN
        x = _convolve(tower, rearrange(chunks, "mel chunks frames -> chunks 1 mel frames"), longest_chunk[:1])
        x = rearrange(x, "chunks tokens dim -> (chunks tokens) dim")[token_places]
        cu_seqlens, schedule = windows
        normed = whisper_layers(tower.layers, x, tower.ln_post, cu_seqlens, cuts.window, schedule, attention)
        x = tower.proj2(linear_activation(normed, tower.proj1, tower.act))
        return output_type(**dict.fromkeys(fields, x))

    spec = BufferSpec(
        rows=InputRows("input_features", shape=(tower.num_mel_bins,), rows_dim=1),
        layout=Lengths("feature_lens", columns=(Column("longest_chunk", pad=cuts.chunk, function=cuts.longest_chunk),)),
        buffers=[
            DeviceBuffer("chunk_frames", cuts.chunk_frames, any_segments=False),
            DeviceBuffer("token_places", cuts.token_places, any_segments=False),
            DeviceBuffer("windows", windows, any_segments=False),
        ],
        outputs=Fields(**dict.fromkeys(fields, Entries(cuts.tokens, cuts.tokens_at))),
        declared_by="recipe",
    )
    if budgets is None:
        budgets = DefaultBudgets([Budget(rows, items=max(4, rows // 512)) for rows in Ladder().row_counts()])
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _convolve(tower: Any, chunks: Tensor, longest: Tensor) -> Tensor:
    """Convolve chunks `[chunks, 1, mel_bins, chunk]` to `[chunks, tokens, dim]` and add the positions in the chunk."""
    # The tower pads chunks to the longest one of the call, and each convolution sees zeros after it. Here all chunks
    # have full size, so entries after `longest` frames, int64 `[1]`, are set to zero before each convolution.
    embeds = []
    for x in chunks.split(tower.conv_chunksize):
        width = longest
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            x = torch.where(torch.arange(x.shape[-1], device=x.device) < width, x, 0)
            x, width = F.gelu(conv(x)), (width + 1) // 2
        embeds.append(x)
    x = rearrange(torch.cat(embeds), "chunks channels mel tokens -> chunks tokens (channels mel)")
    x = tower.conv_out(x)
    out: Tensor = x + tower.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
    return out
