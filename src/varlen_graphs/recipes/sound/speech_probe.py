"""A speech encoder of transformers, and small batches of clips to check a declaration of it with."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields
from varlen_graphs.outputs.entries import Entries, Items
from varlen_graphs.recipes.modes.masked_conv import FrameCount, MaskedConv
from varlen_graphs.recipes.probe import RUN_ERRORS, TowerProbe

BINS = (
    "feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size",
    "input_size", "input_dim",
)  # fmt: skip
"""Settings that hold the bins of a frame of a spectrogram."""

USUAL_BINS = (128, 80)
"""Bins of the extractors of features, to try where no setting holds them."""

STARTS = [64 << doubled for doubled in range(9)]
"""Rows of clips to run first, until the encoder takes one."""

WHOLE = ""
"""Name of an output that is a tensor."""

MASK_OF = "mask"
"""Part of the name of the argument that tells real rows from padding."""


class SpeechProbe(TowerProbe):
    """A speech encoder to run, and what short runs tell.

    Args:
        tower: The encoder.
        mask_dtype: Dtype of the mask that it gets.

    Attributes:
        mask_dtype: As given.
        rows: Declaration of the rows: samples, or frames of a spectrogram.
        mask: Name of the mask argument; `None` if there is none.
        fields: Number of frames in each field of the output; `None` for a field with an entry a clip.
        frames: That of the first field with frames.
        of_mask: Names of the fields that only calls with a mask get.
        as_mask: Names of the fields that have the dtype of the mask, whichever a call brings.
        inside: Number of frames before each convolution with padding and each group norm.
        shortest: Rows of the shortest clip that the encoder takes.

    Raises:
        SpecError: The encoder takes no clips of several lengths, or the sizes of its outputs do not follow from them.
    """

    def __init__(self, tower: nn.Module, mask_dtype: torch.dtype) -> None:
        super().__init__(tower)
        self.mask_dtype = mask_dtype
        self._name = type(tower).__name__
        parameters = [*self.takes.values()]
        masks = [one for one in parameters if MASK_OF in one.name and "output" not in one.name]
        self.mask = masks[0].name if masks else None
        self._needs_mask = bool(masks) and masks[0].default is inspect.Parameter.empty
        self._first = parameters[0].name
        self._dtype = module_dtype(tower)
        self._sizes: dict[int, dict[Any, int]] = {}
        self._start = self._accepted()
        plain, masked = (self._fields(self._run_one(self._start, with_mask)) for with_mask in (self._needs_mask, True))
        self.of_mask = [name for name in masked if name not in plain]
        self.as_mask = self._as_mask(masked)
        counts = {key: self._count(key) for key in self._sizes[self._start]}
        self.shortest, squeezes = self._shortest([*counts.values()])
        least = self.shortest if squeezes else 0
        fields = {name: counts.get(name) for name in masked}
        self.fields = {name: count and replace(count, least=least) for name, count in fields.items()}
        self.inside = [count for key, count in counts.items() if isinstance(key, int)]
        self.frames = next(iter(counts.values()))

    def _shortest(self, counts: Sequence[FrameCount]) -> tuple[int, bool]:
        """Return the rows of the shortest clip that the encoder takes, and True if it squeezes frames: that has two."""
        refusals = []
        for frames in (1, 2):
            rows = max(1, *(frames * count.stride - count.offset for count in counts))
            try:
                self._measured(rows)
            except RUN_ERRORS as error:
                refusals.append(f"it takes no clip of {rows} rows, which has {counted(frames, 'frame')}: {error}")
            else:
                return rows, frames > 1
        raise SpecError(refusals[0])

    def outputs(self, hidden_states: bool = False) -> Declared:
        """Declare the output."""
        fields: dict[str, Declared] = {
            name: Items() if count is None else Entries(count) for name, count in self.fields.items()
        }
        if WHOLE in fields:
            return fields[WHOLE]
        if hidden_states:
            fields[HIDDEN_STATES] = Entries(self._of_states)
        return Fields(**fields)

    @cached_property
    def _of_states(self) -> FrameCount:
        """Number of frames of the hidden states: that of a field with as many."""
        output = self._run_one(self._start, True, **{OUTPUT_HIDDEN_STATES: True})
        sizes = {layer.shape[1] for layer in output[HIDDEN_STATES]}
        found = [one for one in self.fields.values() if one is not None and {one(self._start)} == sizes]
        if not found:
            raise SpecError(f"its hidden states have {sorted(sizes)} frames, unlike its other outputs")
        return found[0]

    def calls(self) -> Iterator[list[int]]:
        """Yield the rows of the clips of small batches: of several lengths, one clip, and clips of one length.

        Some have a frame more, because encoders may squeeze frames in pairs.
        """
        step = max(one.stride for one in self.fields.values() if one is not None)
        start = self._start
        yield [start + 5 * step + 1, self.shortest + step, start + 3]
        yield [start + 2]
        yield [start + 2 + step]
        yield [start + step - 1] * 2

    def check(self, spec: BufferSpec, forward: Callable[..., Any], ragged: bool, asked: Mapping[str, Any]) -> None:
        """Check that the declared forward gives what the encoder itself gives, however far calls are padded.

        Raises what `Trial.check` does.
        """
        trial = self.trial(spec, forward, Budget.padded(4, 2 * self._start))
        asked = self.plain | dict(asked)
        for lengths in self.calls():
            is_ragged, longest = min(lengths) < max(lengths), max(lengths)
            if is_ragged and not ragged:
                continue
            own, padded = (
                {self._first: self._batch(lengths, length, fill), spec.layout.name: self._real(lengths, length)}
                for length, fill in ((longest, 0.0), (longest + self._start // 2 + 1, torch.nan))
            )
            mask = own[spec.layout.name] if is_ragged or self._needs_mask else None
            trial.check({**padded, **asked}, self._call(own[self._first], mask, asked), answered=own)

    def _accepted(self) -> int:
        """Return the rows of a clip that the encoder takes, with several frames; finds the shape of a row."""
        config: Any = getattr(self.tower, "config", None)
        found = [value for name in BINS if isinstance(value := getattr(config, name, None), int)]
        found += [part.in_features for part in self.tower.modules() if isinstance(part, nn.Linear)][:1]
        found += USUAL_BINS
        refusals = dict[tuple[int, ...], str]()
        for start in STARTS:
            for shape in [*((bins,) for bins in dict.fromkeys(found)), ()]:
                self.rows = InputRows(self._first, shape=shape)
                self._sizes.clear()
                try:
                    sizes = self._measured(start)
                except RUN_ERRORS as error:
                    refusals[shape] = f"for {self._first} {[1, start, *shape]} it raises {error!r}"
                    continue
                if min(sizes.values(), default=0) > 2:
                    return start
        raise SpecError(f"{self._name} takes no clips: {'; '.join(refusals.values()) or 'its outputs have no frames'}")

    def _measured(self, rows: int) -> dict[Any, int]:
        """Return the size of each output, by name, and of the time inside, by its place, for one clip."""
        if rows not in self._sizes:
            with MaskedConv() as mode:
                output = self._run_one(rows, True)
            fields = self._fields(output).items()
            sizes = {name: part.shape[1] for name, part in fields if part.dim() > 2 or not part.is_floating_point()}
            self._sizes[rows] = {**sizes, **dict(enumerate(mode.frames))}
        return self._sizes[rows]

    def _count(self, key: Any) -> FrameCount:
        """Return the number of frames as a function of the rows."""
        start = self._start
        ends = [start]
        for _ in range(2):
            more = self._measured(ends[-1])[key] + 1
            ends.append(self._smallest(partial(self._reaches, key, more), ends[-1]))
        _, first, second = ends
        stride = second - first
        count = FrameCount(stride, self._measured(first)[key] * stride - first)
        for rows in (start, start + 1, second + 1, 2 * start, 2 * start + stride // 2 + 1, 3 * start - 1):
            if self._measured(rows)[key] != count(rows):
                raise SpecError(
                    f"its {key} has {self._measured(rows)[key]} frames for {rows} rows: expected {count(rows)}, from "
                    f"one frame every {stride} rows"
                )
        return count

    def _reaches(self, key: Any, frames: int, rows: int) -> bool:
        return self._measured(rows)[key] >= frames

    @staticmethod
    def _smallest(holds: Callable[[int], bool], above: int) -> int:
        """Return the smallest number above another one for which something holds, which then holds for larger ones."""
        step = 1
        while not holds(above + step):
            step *= 2
            if step > STARTS[-1]:
                raise SpecError(f"its outputs do not grow with the rows of a clip beyond {above} rows")
        low, high = above + step // 2, above + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def _run_one(self, rows: int, with_mask: bool, **asked: Any) -> Any:
        real = self._real([rows], rows)
        return self._call(self._batch([rows], rows, 0.0), real if with_mask else None, asked)

    def _call(self, clips: Tensor, real: Tensor | None, asked: Mapping[str, Any]) -> Any:
        masks = {} if real is None or self.mask is None else {self.mask: real}
        return self.run({self._first: clips, **masks, **self.plain, **asked})

    def _as_mask(self, fields: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those fields of a call with a mask that follow its dtype: tried with another one."""
        names = [name for name, field in fields.items() if field.dtype == self.mask_dtype]
        other = torch.int64 if self.mask_dtype == torch.bool else torch.bool
        real = self._real([self._start], self._start).to(other)
        try:
            own = self._fields(self._call(self._batch([self._start], self._start, 0.0), real, {})) if names else {}
        except RUN_ERRORS:  # it takes no such mask
            return []
        return [name for name in names if name in own and own[name].dtype == other]

    def _fields(self, output: Any) -> dict[str, Tensor]:
        """Return the tensors of an output by name."""
        if isinstance(output, Tensor):
            return {WHOLE: output}
        if not isinstance(output, Mapping):
            raise SpecError(f"{self._name} returns a {type(output).__name__}: expected a tensor, or named fields")
        fields = {name: part for name, part in output.items() if part is not None and name != HIDDEN_STATES}
        if unknown := [name for name, part in fields.items() if not isinstance(part, Tensor)]:
            raise SpecError(f"{self._name} returns {unknown}, which are no tensors")
        return fields

    def _real(self, lengths: Sequence[int], longest: int) -> Tensor:
        return real_rows(torch.tensor(lengths, device=self.device), longest).to(self.mask_dtype)

    def _batch(self, lengths: Sequence[int], longest: int, fill: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        batch = torch.full((len(lengths), longest, *(self.rows.shape or ())), fill, device="cpu")
        for clip, rows in zip(batch, lengths, strict=True):
            clip[:rows] = torch.randn(rows, *(self.rows.shape or ()), generator=generator, device="cpu")
        return batch.to(self.device, self._dtype)
