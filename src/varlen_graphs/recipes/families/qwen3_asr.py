"""The audio tower of Qwen3-ASR.

Follows `transformers/models/qwen3_asr/modeling_qwen3_asr.py`, whose submodules it calls by name.

The tower takes a batch of clips, padded to whole chunks of frames. It convolves each chunk with its padding, and keeps
the tokens of frames that the mask marks as real. Here the rows are chunks, so that the padding which the tower reads
comes along, and chunks of padding alone are not computed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, tile_schedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets
from varlen_graphs.buffers import DeviceBuffer
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import LayoutError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.grid_entries import GridEntries
from varlen_graphs.recipes.blocks import whisper_layers
from varlen_graphs.recipes.clips import ClipCuts
from varlen_graphs.recipes.families.chunked_clips import CHUNKS, MISSING, ChunkedClips, TowerOfChunks
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import check_parts, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = (
    "conv2d1", "conv2d2", "conv2d3", "conv_out", "positional_embedding", "layers", "ln_post", "n_window",
    "n_window_infer", "config",
)  # fmt: skip

ROWS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Chunks of the budgets by default."""

CONVOLVED = 64
"""Chunks to convolve at once: what the first convolution returns for them takes 200 MB in half precision."""


@register("Qwen3ASREncoder")
def qwen3_asr(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> ChunkedClips:
    """Graph the audio tower of Qwen3-ASR.

    The encoder is called as the tower is, with `input_features` `[clips, mel_bins, frames]`, padded to whole chunks,
    and `input_features_mask` `[clips, frames]`, and returns the tower's own output type with the tokens of all clips as
    `last_hidden_state` `[tokens, hidden]`. The mask costs one copy to the host. The tower itself answers calls with a
    mask that does not mark the first frames of each clip, or marks none.

    Args:
        tower: `Qwen3ASREncoder`: `model.model.audio_tower` of a whole model.
        budgets: As for `GraphedEncoder`, in chunks of 100 frames. `None` is 4 to 512 chunks, for `max(4, rows // 8)`
            clips.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a Qwen3-ASR audio tower.
    """
    check_parts(tower, PARTS, "the audio tower of Qwen3-ASR, which is model.model.audio_tower of a whole model")
    output_type = output_class(tower, "BaseModelOutputWithPooling")
    attn = tower.layers[0].self_attn
    chunk: int = 2 * tower.n_window
    cuts = ClipCuts(chunk, tower.n_window_infer // chunk)
    of_chunk = cuts.chunk_tokens(chunk)

    def tokens(t: int, h: int, chunks: int, missing: int) -> int:
        if not 0 <= missing < chunk:
            raise LayoutError(f"{MISSING} of a clip is {missing}: expected 0 to {chunk - 1} frames, less than a chunk")
        return cuts.tokens(chunks * chunk - missing)

    def tokens_at(budget: Budget) -> int:
        return budget.rows * of_chunk

    def counts(table: ItemTable) -> Tensor:
        missing = table.column(MISSING).clamp(0, chunk - 1)
        return cuts.tokens((table.item_rows * chunk - missing).clamp(min=0))

    def windows(table: ItemTable) -> tuple[Tensor, TileSchedule]:
        most = tokens_at(table.budget)
        starts = cuts.window_starts(counts(table), most)
        return starts, tile_schedule(starts, cuts.window, rows=most, heads=attn.num_heads, head_dim=attn.head_dim)

    def token_places(table: ItemTable) -> Tensor:
        ends, most = counts(table).cumsum(0), tokens_at(table.budget)
        token = torch.arange(most, device=table.device)
        item = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
        within = token - (ends - counts(table))[item]
        return (table.item_starts[item] * of_chunk + within).clamp(0, most - 1)

    def forward(
        chunked: Any, input_features: Tensor, token_places: Tensor, windows: tuple[Tensor, TileSchedule],
        output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        tower = chunked.tower
        x = rearrange(_convolve(tower, input_features), "chunks tokens dim -> (chunks tokens) dim")[token_places]
        cu_seqlens, schedule = windows
        states = list[Tensor]()
        normed = whisper_layers(
            tower.layers, x, tower.ln_post, cu_seqlens, cuts.window, schedule, attention, states=states
        )
        return output_type(last_hidden_state=normed, **recorded(states, states[-1], output_hidden_states))

    entries = GridEntries(tokens, tokens_at)
    spec = BufferSpec(
        rows=InputRows("input_features", shape=(tower.config.num_mel_bins, chunk)),
        layout=Lengths(CHUNKS, columns=(Column(MISSING),)),
        buffers=[
            DeviceBuffer("token_places", token_places, any_segments=False),
            DeviceBuffer("windows", windows, any_segments=False),
        ],
        outputs=Fields(last_hidden_state=entries, hidden_states=entries),
        declared_by="recipe",
    )
    if budgets is None:
        budgets = DefaultBudgets([Budget(rows, items=max(4, rows // 8)) for rows in ROWS])
    return ChunkedClips(TowerOfChunks(tower), budgets, spec, forward=forward, **options)


def _convolve(tower: Any, chunks: Tensor) -> Tensor:
    """Convolve chunks `[chunks, mel_bins, chunk]` to `[chunks, tokens, dim]` and add the positions in the chunk."""
    parts = []
    for x in chunks[:, None].split(CONVOLVED):
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            x = F.gelu(conv(x))
        parts.append(x)
    x = torch.cat(parts)
    x = tower.conv_out(rearrange(x, "chunks channels mel tokens -> chunks tokens (channels mel)"))
    out: Tensor = x + tower.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
    return out
