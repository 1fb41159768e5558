"""Clips of audio cut into chunks that are convolved one by one, and their tokens into windows of attention.

The host needs plain integers of it; what a graph computes is torch operations on the item table, of shapes that follow
from the budget alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Layout

Count = TypeVar("Count", int, Tensor)


class Pieces(NamedTuple):
    """Spans cut into pieces. Pieces past the last one are empty.

    Attributes:
        span: The span of each piece, int64 `[pieces]`; a valid but arbitrary index where there is no piece.
        start: How many entries of the span come before, int64 `[pieces]`; 0 where there is no piece.
        length: How many entries it has, int64 `[pieces]`; 0 where there is no piece.
    """

    span: Tensor
    start: Tensor
    length: Tensor


@dataclass(frozen=True)
class ClipCuts:
    """How a tower cuts clips. Frames are the rows of items, and a clip is an item.

    Attributes:
        chunk: Frames of a chunk; the last one of a clip may have fewer.
        window_chunks: Chunks of a window.
        stride: Frames of a token: 8 after three convolutions, each of stride 2.
    """

    chunk: int
    window_chunks: int = 1
    stride: int = 8

    @property
    def window(self) -> int:
        """Tokens of a window; the last one of a clip may have fewer."""
        return self.window_chunks * self.chunk_tokens(self.chunk)

    def chunk_tokens(self, frames: Count) -> Count:
        """Tokens of chunks of so many frames."""
        return (frames + self.stride - 1) // self.stride

    def tokens(self, frames: Count) -> Count:
        """Tokens of clips of so many frames."""
        return frames // self.chunk * self.chunk_tokens(self.chunk) + self.chunk_tokens(frames % self.chunk)

    def tokens_at(self, budget: Budget) -> int:
        """The most tokens that the clips of a budget can have."""
        more = (
            self.stride * self.chunk_tokens(self.chunk) - self.chunk
        )  # frames for which a full chunk's tokens have room
        more_at_ends = (self.stride - 1) * min(budget.items, budget.rows)
        return (budget.rows + budget.rows // self.chunk * more + more_at_ends) // self.stride

    def longest_chunk(self, call: Layout) -> list[int]:
        """Frames of the longest chunk of a call, once for each clip."""
        return [min(max(call.rows), self.chunk)] * len(call)

    def chunk_frames(self, table: ItemTable) -> tuple[Tensor, Tensor]:
        """Which frame is where in each chunk, int64 `[chunks, chunk]`, and whether there is one, bool of that shape."""
        chunks = self._chunks(table)
        at = torch.arange(self.chunk, device=table.device)
        frames = (table.item_starts[chunks.span] + chunks.start)[:, None] + at
        return frames.clamp(max=table.budget.rows - 1), at < chunks.length[:, None]

    def chunk_lengths(self, table: ItemTable) -> Tensor:
        """Frames of each chunk, int64 `[chunks]`; 0 where there is no chunk."""
        return self._chunks(table).length

    def token_places(self, table: ItemTable) -> Tensor:
        """Where each token is among those of all chunks, if each had as many as a full one, int64 `[tokens]`."""
        tokens = _cut(self.chunk_tokens(self._chunks(table).length), 1, self.tokens_at(table.budget))
        return tokens.span * self.chunk_tokens(self.chunk) + tokens.start

    def cu_seqlens(self, table: ItemTable) -> Tensor:
        """Where windows begin, int32 `[windows + 1]`: starts at 0, and the tail repeats the number of tokens."""
        most = _most_pieces(self.tokens_at(table.budget), table.budget.items, self.window)
        windows = _cut(self.tokens(table.item_rows), self.window, most)
        return F.pad(windows.length.cumsum(0), (1, 0)).int()

    def pairs(self, frames: Count) -> Count:
        """Pairs of tokens of clips of so many frames; a last one alone is in none."""
        return self.tokens(frames) // 2

    def pairs_at(self, budget: Budget) -> int:
        """The most pairs that the clips of a budget can have."""
        return self.tokens_at(budget) // 2

    def pair_places(self, table: ItemTable) -> Tensor:
        """The first token of each pair, int64 `[pairs]`; the second one follows it."""
        tokens = self.tokens(table.item_rows)
        pairs = _cut(tokens // 2, 1, self.pairs_at(table.budget))
        first = (tokens.cumsum(0) - tokens)[pairs.span] + 2 * pairs.start
        return first.clamp(max=max(0, self.tokens_at(table.budget) - 2))

    def _chunks(self, table: ItemTable) -> Pieces:
        return _cut(table.item_rows, self.chunk, _most_pieces(table.budget.rows, table.budget.items, self.chunk))


def _most_pieces(entries: int, spans: int, size: int) -> int:
    """The most pieces of `size` that so many spans of together so many entries can have."""
    return (entries + (size - 1) * min(spans, entries)) // size


def _cut(lengths: Tensor, size: int, pieces: int) -> Pieces:
    """Cut spans of `lengths` entries, int64 `[spans]`, into pieces of `size`, of which there are at most `pieces`."""
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    piece = torch.arange(pieces, device=lengths.device)
    span = torch.searchsorted(ends, piece, right=True).clamp(max=lengths.shape[0] - 1)
    start = torch.where(piece < ends[-1:], (piece - (ends - counts)[span]) * size, 0)
    length = torch.where(piece < ends[-1:], (lengths[span] - start).clamp(max=size), 0)
    return Pieces(span, start, length)
