"""Clips of audio cut into chunks that are convolved one by one, and their tokens into windows of attention.

The host needs plain integers of it; what a graph computes is torch operations on the item table, of shapes that follow
from the budget alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.layout import Layout
from varlen_graphs.table import ItemTable

STRIDE = 8
"""Frames a token: three convolutions, each of stride 2."""

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
    """

    chunk: int
    window_chunks: int

    @property
    def window(self) -> int:
        """Tokens of a window; the last one of a clip may have fewer."""
        return self.window_chunks * _chunk_tokens(self.chunk)

    def tokens(self, frames: Count) -> Count:
        """Tokens of clips of so many frames."""
        return frames // self.chunk * _chunk_tokens(self.chunk) + _chunk_tokens(frames % self.chunk)

    def tokens_at(self, budget: Budget) -> int:
        """The most tokens that the clips of a budget can have."""
        more = STRIDE * _chunk_tokens(self.chunk) - self.chunk  # frames that the tokens of a full chunk have room for
        more_at_ends = (STRIDE - 1) * min(budget.items, budget.rows)
        return (budget.rows + budget.rows // self.chunk * more + more_at_ends) // STRIDE

    def longest_chunk(self, call: Layout) -> list[int]:
        """Frames of the longest chunk of a call, once for each clip."""
        return [min(max(call.rows), self.chunk)] * len(call)

    def chunk_frames(self, table: ItemTable) -> tuple[Tensor, Tensor]:
        """Which frame is where in each chunk, int64 `[chunks, chunk]`, and whether there is one, bool of that shape."""
        chunks = self._chunks(table)
        at = torch.arange(self.chunk, device=table.device)
        frames = (table.item_starts[chunks.span] + chunks.start)[:, None] + at
        return frames.clamp(max=table.budget.rows - 1), at < chunks.length[:, None]

    def token_places(self, table: ItemTable) -> Tensor:
        """Where each token is among those of all chunks, if each had as many as a full one, int64 `[tokens]`."""
        tokens = _cut(_chunk_tokens(self._chunks(table).length), 1, self.tokens_at(table.budget))
        return tokens.span * _chunk_tokens(self.chunk) + tokens.start

    def cu_seqlens(self, table: ItemTable) -> Tensor:
        """Where windows begin, int32 `[windows + 1]`: starts at 0, and the tail repeats the number of tokens."""
        most = _most_pieces(self.tokens_at(table.budget), table.budget.items, self.window)
        windows = _cut(self.tokens(table.item_rows), self.window, most)
        return F.pad(windows.length.cumsum(0), (1, 0)).int()

    def _chunks(self, table: ItemTable) -> Pieces:
        return _cut(table.item_rows, self.chunk, _most_pieces(table.budget.rows, table.budget.items, self.chunk))


def _chunk_tokens(frames: Count) -> Count:
    """Tokens of one chunk."""
    return (frames + STRIDE - 1) // STRIDE


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
