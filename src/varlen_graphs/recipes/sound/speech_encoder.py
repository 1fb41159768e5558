"""Encoder of clips that answers all calls that the speech encoder itself answers."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import InputError, LayoutError, counted
from varlen_graphs.recipes.padding_consumers import PaddingConsumers
from varlen_graphs.recipes.sound.speech_probe import SpeechProbe
from varlen_graphs.recipes.tower_encoder import TowerEncoder

CLIP_MASK = "clip_mask"
"""Name of the mask for towers that let padding reach real frames; a mask that calls bring has the tower's name."""


class SpeechEncoder(TowerEncoder):
    """Encoder of clips, called as the tower is, with samples or spectrograms and a mask.

    Calls with a mask that does not mark the first rows of each clip, or is not of zeros and ones, run the tower itself
    and count in `stats.eager`. So do calls of clips of several lengths if the tower lets padding reach real frames, or
    if a model around it reads the frames of padding, or took no call to find out.

    Attributes:
        alone: True if it does, so that graphs take clips of one length.
    """

    def __init__(
        self, tower: nn.Module, probe: SpeechProbe, budgets: Any, spec: BufferSpec, *, alone: bool,
        around: PaddingConsumers, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(tower, budgets, spec, **options)
        self.alone = alone
        self._around = around
        self._mask = probe.mask or CLIP_MASK
        self._of_mask = probe.of_mask
        self._as_mask = probe.as_mask
        self._shortest = probe.shortest
        parameters = inspect.signature(tower.forward).parameters.values()
        self._names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the clips of one call.

        Returns:
            The tower's output. Frames past the end of each clip are zeros.

        Raises:
            InputError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        if self.executor.forward.is_running:  # the graphs' forward calls the tower, in whose place the encoder is
            return self.executor.forward.module_forward(*args, **kwargs)
        self._check(args, kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        clips: Any = call.get(self.spec.row_input.name)
        mask = call.get(self._mask)
        if isinstance(clips, Tensor) and clips.dim() > 1 and clips.shape[1] < self._shortest:
            return self._itself(f"clips of less than {self._shortest} rows", len(clips), args, kwargs)
        reads = None if mask is None else self._around.of_any()
        if reads is not None and not _marks_all(mask, clips):
            return self._itself(reads, len(clips), args, kwargs)
        unmasked = self.alone and call.pop(self._mask, None) is not None
        if unmasked and not _marks_all(mask, clips):
            return self._itself(f"{self._mask} of clips of several lengths", len(clips), args, kwargs)
        try:
            output = self._instead(call, len(clips), args, kwargs)[0] if unmasked else super().forward(**call)
        except LayoutError:
            if mask is None:
                raise
            return self._itself(
                f"{self._mask} that does not mark the first rows of each clip", len(clips), args, kwargs
            )
        if mask is None and self._of_mask and isinstance(output, Mapping):
            return type(output)(**{**output, **dict.fromkeys(self._of_mask)})
        if isinstance(mask, Tensor) and isinstance(output, Mapping):
            for name in self._as_mask:
                if output.get(name) is not None:
                    output[name] = output[name].to(mask.dtype)  # type: ignore[index]  # a ModelOutput is a dict
        return output

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that the tower takes these arguments, too: `CLIP_MASK` is known to the graphs alone."""
        takes = f"{type(self.module).__name__} takes {self._names}"
        if len(args) > len(self._names):
            raise InputError(f"got {counted(len(args), 'positional argument')}; {takes}")
        for name in kwargs:
            if name == CLIP_MASK:
                raise InputError(f"got an unknown argument {name!r}; {takes}")
            if name in self._names[: len(args)]:
                raise InputError(f"argument {name!r} came twice, by position and by name")


def _marks_all(mask: Any, clips: Any) -> bool:
    """Return True if a mask marks all rows of a batch as real. A mask on a GPU costs a sync."""
    return isinstance(mask, Tensor) and mask.shape == clips.shape[:2] and bool((mask == 1).all())
