"""Recipe for speech encoders of transformers: their own forward on padded clips, with masks made in the graph."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, PaddedLadder
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.errors import SpecError, VarlenGraphsError
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.layouts.padded import key_padding_mask, real_rows
from varlen_graphs.recipes.modes.masked_conv import FrameCount, MaskedConv
from varlen_graphs.recipes.padding_consumers import NOTHING, PaddingConsumers
from varlen_graphs.recipes.probe import RUN_ERRORS, tolerance_of, why_not
from varlen_graphs.recipes.sound.speech_encoder import CLIP_MASK, SpeechEncoder
from varlen_graphs.recipes.sound.speech_probe import SpeechProbe
from varlen_graphs.recipes.towers import check_loaded
from varlen_graphs.shadows.shadow import Shadow

SECOND_OF_SAMPLES, SECOND_OF_FRAMES = 16_000, 100
"""Rows a second, for budgets by default."""

LONGEST = 30
"""Seconds of the longest clip of a budget by default."""


@dataclass(frozen=True)
class ClipMask(Mask):
    """Mask of a padded batch of clips, each of which the module sees as long enough for a frame.

    Attributes:
        shortest: Rows of such a clip.
    """

    clean_padding = True
    shortest: int = 1

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return the mask `[batch, length]` of the budget, from the values of an item table."""
        rows = values[:, 2].clamp(min=min(self.shortest, budget.max_seqlen))
        return key_padding_mask(real_rows(rows, budget.max_seqlen), self.dtype, self.real)


class DeclaredSpeech(NamedTuple):
    """A declaration to try, and its forward."""

    probe: SpeechProbe
    spec: BufferSpec
    forward: Callable[..., Any]
    alone: bool

    def check(self, asked: Mapping[str, Any]) -> None:
        """Check it on calls with these arguments; see `SpeechProbe.check`."""
        self.probe.check(self.spec, self.forward, not self.alone, asked)


def speech(
    tower: Any, budgets: Budgets | None = None, *, around: PaddingConsumers = NOTHING, **options: Any
) -> SpeechEncoder:
    """Graph a speech encoder of transformers that takes clips of several lengths: wav2vec 2.0, Conformers and the like.

        encoder = vg.recipes.speech(model.wav2vec2)
        features = encoder(input_values, attention_mask=mask).last_hidden_state

    The encoder is called as the tower is, with samples `[batch, samples]` or spectrograms `[batch, frames, bins]` and
    the mask `[batch, length]`, and returns the tower's own output class, with zeros past the frames of each clip. What
    padding holds counts for nothing. The graphs hold the tower's own forward on a padded batch.

    Some towers let padding reach real frames, by group norms (wav2vec2-base) or convolutions without a mask. Their
    graphs take calls without a mask, or with a mask of ones; calls of clips of several lengths run the tower itself.

    The numbers of frames are found, and both forms checked, on a few short clips of random numbers on the device of the
    tower: alone, together, and padded to different lengths. The runs are those of a copy that shares the weights, and
    sync with the host, as does a mask on the GPU.

    Args:
        tower: The tower, on its device, in its dtype and in evaluation mode.
        budgets: As for `GraphedEncoder`; `None` is a `PaddedLadder` of up to 8 clips of 1 to 30 seconds.
        around: What a model around the tower reads of the outputs for padding, where graphs leave zeros; `wrap` finds
            it. Calls of clips of several lengths then run the tower itself.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: The tower takes no clips of any length, or gives other outputs in a longer batch, or cannot be
            captured. The message has the reasons.
    """
    if tower.training:
        raise SpecError(f"{type(tower).__name__} is in training mode, in which it masks features: call .eval() first")
    check_loaded(tower)
    with torch.no_grad():
        probe, spec, forward, alone = _declare(Shadow(tower).module, tolerance_of(options))
    if budgets is None:
        second = SECOND_OF_FRAMES if spec.row_input.shape else SECOND_OF_SAMPLES
        budgets = DefaultBudgets(PaddedLadder(batch=8, length=LONGEST * second, min_length=second, step=1.5))
    return SpeechEncoder(tower, probe, budgets, spec, forward=forward, alone=alone, around=around, **options)


def _declare(tower: nn.Module, tolerance: float | None) -> DeclaredSpeech:
    """Return the first declaration that passes the check."""
    failures: dict[str, None] = {}
    for attempt in _attempts(tower, tolerance, failures):
        reason = why_not(partial(attempt.check, {}))
        if reason is None:
            return _with_hidden_states(attempt)
        failures[reason] = None
    raise SpecError(f"{type(tower).__name__} cannot be graphed as a speech encoder:\n- " + "\n- ".join(failures))


def _with_hidden_states(right: DeclaredSpeech) -> DeclaredSpeech:
    """Return the declaration with the hidden states of all layers, if the forward returns them as the tower does."""
    try:
        attempt = right._replace(spec=replace(right.spec, outputs=right.probe.outputs(True)))
    except (VarlenGraphsError, *RUN_ERRORS):
        return right
    return right if why_not(partial(attempt.check, {OUTPUT_HIDDEN_STATES: True})) else attempt


def _attempts(tower: nn.Module, tolerance: float | None, failures: dict[str, None]) -> Iterator[DeclaredSpeech]:
    """Yield declarations: clips under the tower's own mask, then each as if it were alone. Adds why there are none."""
    for dtype in (torch.int64, torch.bool):
        try:
            probe = SpeechProbe(tower, dtype)
            probe.tolerance = tolerance
        except (VarlenGraphsError, *RUN_ERRORS) as error:
            failures[str(error)] = None
            continue
        outputs = probe.outputs()
        mask = ClipMask(probe.mask or CLIP_MASK, dtype, optional=True, shortest=probe.shortest)
        spec = BufferSpec(probe.rows, mask, outputs=outputs, declared_by="recipe")
        if probe.mask is not None:
            yield DeclaredSpeech(probe, spec, _forward(probe), alone=False)
        spec = replace(spec, layout=replace(mask, name=CLIP_MASK))
        for how in ({}, {"picked": True}, {"attends": True}, {"pools": True}):
            yield DeclaredSpeech(probe, spec, _forward_alone(probe, **how), alone=True)


def _forward(probe: SpeechProbe) -> Callable[..., Any]:
    """Return the tower's own forward, called as a function of the tower."""

    def forward(tower: nn.Module, **arguments: Any) -> Any:
        with MaskedConv():
            return tower.forward(**arguments)

    return _with_signature(forward, probe, str(probe.mask))


def _forward_alone(
    probe: SpeechProbe, picked: bool = False, attends: bool = False, pools: bool = False
) -> Callable[..., Any]:
    """Return the tower's own forward with each clip as if it were alone.

    If `picked`, the tower takes every so many entries of the mask for its frames, which has just as many then. If
    `attends`, its own mask does not keep its attention from the padding. If `pools`, it squeezes frames, and makes as
    many again in the end: of those that fill no piece, zeros.
    """
    count, own_mask, inside, fields = probe.frames, probe.mask, probe.inside, probe.fields

    def forward(tower: nn.Module, **arguments: Any) -> Any:
        mask = arguments.pop(CLIP_MASK)
        rows = mask.sum(1)
        if picked:
            mask = real_rows((count.of(rows) - 1) * count.stride + 1, mask.shape[1]).to(mask.dtype)
        if own_mask is not None:
            arguments[own_mask] = mask
        with MaskedConv(rows, inside, count if attends else None, pools) as mode:
            output = tower.forward(**arguments)
        return _without_pieces(fields, output, rows, mode.piece) if pools else output

    return _with_signature(forward, probe, CLIP_MASK)


def _without_pieces(counts: Mapping[str, FrameCount | None], output: Any, rows: Tensor, piece: int) -> Any:
    """Return an output with zeros in the frames of each clip that fill no piece of so many."""
    fields = {}
    for name, count in counts.items():
        if count is not None and output.get(name) is not None:
            real = real_rows(count.of(rows) // piece * piece, output[name].shape[1])
            fields[name] = output[name].masked_fill(~real[..., None], 0)
    return type(output)(**{**output, **fields})


def _with_signature(forward: Callable[..., Any], probe: SpeechProbe, mask: str) -> Callable[..., Any]:
    """Return the function with the arguments of the tower's own forward, but this mask in place of its own."""
    own = inspect.signature(probe.tower.forward).parameters.values()
    tower = inspect.Parameter("tower", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = [tower, *(one for one in own if one.name != probe.mask)]
    arguments.append(inspect.Parameter(mask, inspect.Parameter.KEYWORD_ONLY))
    forward.__signature__ = inspect.Signature(sorted(arguments, key=lambda one: one.kind))  # type: ignore[attr-defined]
    return forward
