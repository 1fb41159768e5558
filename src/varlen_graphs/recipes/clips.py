"""Audio clips cut into chunks that are convolved one by one, and their tokens cut into attention windows.

Methods of plain integers run on the host. Methods of an item table run inside the graph, as torch operations whose
shapes follow from the budget alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout

Count = TypeVar("Count", int, Tensor)


class Pieces(NamedTuple):
    """Pieces of spans, int64 `[pieces]` each. Pieces past the last one are empty."""

    span: Tensor  # a valid but arbitrary index for empty pieces
    start: Tensor  # entries of the span before the piece; 0 for empty pieces
    length: Tensor  # 0 for empty pieces


@dataclass(frozen=True)
class ClipCuts:
    """Sizes into which a tower cuts clips. A clip is an item, and its frames are the rows."""

    chunk: int  # frames per chunk; the last chunk of a clip may have fewer
    window_chunks: int = 1  # chunks per window
    stride: int = 8  # frames per token: 8 after three convolutions of stride 2

    @property
    def window(self) -> int:
        """Tokens per window; the last window of a clip may have fewer."""
        return self.window_chunks * self.chunk_tokens(self.chunk)

    def chunk_tokens(self, frames: Count) -> Count:
        """Return the tokens of a chunk of `frames` frames."""
        return (frames + self.stride - 1) // self.stride

    def tokens(self, frames: Count) -> Count:
        """Return the tokens of a clip of `frames` frames."""
        return frames // self.chunk * self.chunk_tokens(self.chunk) + self.chunk_tokens(frames % self.chunk)

    def tokens_at(self, budget: Budget) -> int:
        """Return the maximum number of tokens of the clips of a budget."""
        more = self.stride * self.chunk_tokens(self.chunk) - self.chunk  # frames that the last token of a chunk lacks
        more_at_ends = (self.stride - 1) * min(budget.items, budget.rows)
        return (budget.rows + budget.rows // self.chunk * more + more_at_ends) // self.stride

    def longest_chunk(self, call: Layout) -> list[int]:
        """Return the frames of the longest chunk of a call, repeated for each clip."""
        return [min(max(call.rows), self.chunk)] * len(call)

    def chunk_frames(self, table: ItemTable) -> tuple[Tensor, Tensor]:
        """Return the row of each frame of each chunk, int64 `[chunks, chunk]`, and a mask of real frames, bool."""
        chunks = self._chunks(table)
        at = torch.arange(self.chunk, device=table.device)
        frames = (table.item_starts[chunks.span] + chunks.start)[:, None] + at
        return frames.clamp(max=table.budget.rows - 1), at < chunks.length[:, None]

    def chunk_lengths(self, table: ItemTable) -> Tensor:
        """Return the frames of each chunk, int64 `[chunks]`; 0 for empty chunks."""
        return self._chunks(table).length

    def token_places(self, table: ItemTable) -> Tensor:
        """Return the index of each token among those of all chunks, padded to full chunks, int64 `[tokens]`."""
        tokens = _cut(self.chunk_tokens(self._chunks(table).length), 1, self.tokens_at(table.budget))
        return tokens.span * self.chunk_tokens(self.chunk) + tokens.start

    def cu_seqlens(self, table: ItemTable) -> Tensor:
        """Return the starts of the windows, int32 `[windows + 1]`: the tail repeats the number of tokens."""
        return self.window_starts(self.tokens(table.item_rows), self.tokens_at(table.budget))

    def window_starts(self, tokens: Tensor, most: int) -> Tensor:
        """Return the starts of the windows of clips of so many tokens, `[items]`, and of at most `most` in all."""
        windows = _cut(tokens, self.window, _most_pieces(most, len(tokens), self.window))
        return F.pad(windows.length.cumsum(0), (1, 0)).int()

    def pairs(self, frames: Count) -> Count:
        """Return the pairs of tokens of a clip of `frames` frames; an odd last token is in no pair."""
        return self.tokens(frames) // 2

    def pairs_at(self, budget: Budget) -> int:
        """Return the maximum number of token pairs of the clips of a budget."""
        return self.tokens_at(budget) // 2

    def pair_places(self, table: ItemTable) -> Tensor:
        """Return the first token of each pair, int64 `[pairs]`; the second token follows it."""
        tokens = self.tokens(table.item_rows)
        pairs = _cut(tokens // 2, 1, self.pairs_at(table.budget))
        first = (tokens.cumsum(0) - tokens)[pairs.span] + 2 * pairs.start
        return first.clamp(max=max(0, self.tokens_at(table.budget) - 2))

    def _chunks(self, table: ItemTable) -> Pieces:
        return _cut(table.item_rows, self.chunk, _most_pieces(table.budget.rows, table.budget.items, self.chunk))


def _most_pieces(entries: int, spans: int, size: int) -> int:
    """Return the maximum number of pieces of `size` entries that `spans` spans with `entries` entries in total have."""
    return (entries + (size - 1) * min(spans, entries)) // size


def _cut(lengths: Tensor, size: int, pieces: int) -> Pieces:
    """Cut spans of `lengths` entries, int64 `[spans]`, into at most `pieces` pieces of `size` entries."""
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    piece = torch.arange(pieces, device=lengths.device)
    span = torch.searchsorted(ends, piece, right=True).clamp(max=lengths.shape[0] - 1)
    start = torch.where(piece < ends[-1:], (piece - (ends - counts)[span]) * size, 0)
    length = torch.where(piece < ends[-1:], (lengths[span] - start).clamp(max=size), 0)
    return Pieces(span, start, length)
