"""Encoder of a tower that takes a batch of clips, padded to whole chunks, with the chunks of all clips as rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.recipes.tower_encoder import TowerEncoder

ROWS, MASK = "input_features", "input_features_mask"
CHUNKS, MISSING = "chunks", "missing_frames"
"""Arguments that describe clips: their numbers of chunks, and how many frames at the end of the last are padding."""


class TowerOfChunks(nn.Module):
    """The tower itself, called with the chunks of all clips.

    Args:
        tower: A tower called with `input_features` `[clips, mel_bins, frames]` and `input_features_mask`
            `[clips, frames]`, where `frames` are whole chunks.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.own = tower.forward  # the attribute may hold an encoder later

    @property
    def training(self) -> bool:
        """Mode of the tower, which only the tower changes."""
        return self.get_submodule("tower").training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def forward(self, input_features: Tensor, chunks: Any, missing_frames: Any, **asked: Any) -> Any:
        """Run the tower on rows `[chunks, mel_bins, chunk]` of clips with so many `chunks` and `missing_frames`."""
        counts, missing = (
            torch.as_tensor(chunks, device="cpu").tolist(),
            torch.as_tensor(missing_frames, device="cpu").tolist(),
        )
        size = input_features.shape[-1]
        clips = nn.utils.rnn.pad_sequence([*input_features.split(counts)], batch_first=True)
        ends = torch.tensor([count * size - less for count, less in zip(counts, missing, strict=True)], device="cpu")
        mask = (torch.arange(clips.shape[1] * size, device="cpu") < ends[:, None]).long().to(clips.device)
        return self.own(clips.transpose(1, 2).flatten(2), mask, **asked)


class ChunkedClips(TowerEncoder):
    """Encoder of clips, called as the tower is, with `input_features` and `input_features_mask`.

    The tower itself answers calls with a mask that does not mark the first frames of each clip.
    """

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the clips of one call.

        Raises:
            InputError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        call = dict(zip((ROWS, MASK), args, strict=False)) | kwargs
        clips, mask = call.get(ROWS), call.get(MASK)
        lengths = self._lengths(clips, mask)
        if lengths is None:
            return self._itself(f"{MASK} does not mark the first frames of clips of whole chunks", 1, args, kwargs)
        assert isinstance(clips, Tensor)  # noqa: S101 - it has lengths
        size = self.spec.row_input.shape[1]  # type: ignore[index]
        by_chunk = clips.unflatten(2, (-1, size)).transpose(1, 2)
        counts = [-(-length // size) for length in lengths]
        if all(count == by_chunk.shape[1] for count in counts):
            rows = by_chunk.flatten(0, 1)
        else:
            rows = torch.cat([one[:count] for one, count in zip(by_chunk, counts, strict=True)])
        given = {name: value for name, value in call.items() if name not in (ROWS, MASK)}
        heard = [(count, count * size - length) for count, length in zip(counts, lengths, strict=True) if count]
        chunks, missing = map(list, zip(*heard, strict=True))
        return super().forward(**{ROWS: rows, CHUNKS: chunks, MISSING: missing}, **given)

    @property
    def _own_forward(self) -> Callable[..., Any]:
        own: Callable[..., Any] = self.module.own  # type: ignore[assignment]
        return own

    def _lengths(self, clips: Any, mask: Any) -> list[int] | None:
        """Return the frames of each clip, or `None` for calls that graphs do not take. Copies to the host once."""
        bins, size = self.spec.row_input.shape  # type: ignore[misc]
        if not isinstance(clips, Tensor) or not isinstance(mask, Tensor) or clips.dim() != 3:
            return None
        if clips.shape[1] != bins or clips.shape[2] % size or mask.shape != (len(clips), clips.shape[2]):
            return None
        lengths = mask.sum(1).long()
        first = (mask == (torch.arange(mask.shape[1], device=mask.device) < lengths[:, None])).all()
        *frames, is_first = torch.cat([lengths, first[None]]).tolist()
        return frames if is_first and any(frames) else None
