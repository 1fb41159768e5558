"""Find out by trying whether a model around a tower reads the tower's outputs for padding, where graphs leave zeros."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries
from varlen_graphs.recipes.texts.text_probe import IDS, MASK, TextProbe
from varlen_graphs.recipes.towers import device_of
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices
from varlen_graphs.torch_dispatch.thread_modes import run_under

LENGTH = 11
"""Tokens of a text without padding, if the encoder takes so many."""

FRAMES = (40, 24, 24)
"""Frames of the clips to try, which heads may pool by tens. The second is padded with zeros, the last with noise."""

SCORES_EXPANSIONS = "MultiVectorMask"
"""Part of multi-vector models of sentence-transformers: scores tokens that expand a query, outside of the mask."""

FEATURES = ("get_", "_features")
"""Start and end of the names of methods by which models of transformers hand out what they make of their towers."""

DECODED = "decoder_input_ids"
"""Argument of models that decode what their tower encodes."""

READS_AROUND = "padding whose outputs are read by the model around the encoder"
MAY_READ = (
    "padding whose outputs the model around the tower may read: it took no call that vg.wrap knows to try; if it reads "
    "none, wrap the tower alone, as in vg.wrap(model.encoder)"
)


class PaddingConsumers(NamedTuple):
    """Outputs of a tower for padding that a model around it reads, where graphs leave zeros.

    Attributes:
        padding: True if it reads those of padding on the right: RoFormer for multiple choice takes the last place, and
            the projector of Fun-ASR-Nano attends to all frames.
        other_ids: True if it reads those of padding with other ids than the one that pads: classifiers around decoders
            take the last token that has another id.
        ahead: True if it reads those of padding on the left: many classifiers take the first place.
        untried: True if the model took no call to try.
    """

    padding: bool = False
    other_ids: bool = False
    ahead: bool = False
    untried: bool = False

    @classmethod
    def of_texts(cls, models: Sequence[nn.Module], encoder: nn.Module) -> "PaddingConsumers":
        """Run models around an encoder on a few short texts: with its outputs for padding, and with zeros there.

        Copies of them run, in evaluation mode and uncompiled, which share their weights. What is called are their
        functions for features, such as `get_text_features`, and their forwards, with token ids and a mask; a sequence
        takes both in a dict. One that does not run on these alone, or does not repeat its output, tells nothing.

        Args:
            models: The models, the outermost first.
            encoder: The encoder inside of them.

        Raises:
            SpecError: The encoder takes no token ids.
        """
        if not models:
            return cls()
        models, encoder = _shadows(models, encoder)
        text = TextProbe(encoder)
        own = [one for one in range(text.tokens) if one not in text.special] or [text.pad]
        end = text.ends[0] if text.ends else own[-1]
        tokens = [*islice(cycle(own), min(LENGTH, text.largest or LENGTH) - 1), end]
        others = [one for one in dict.fromkeys([*text.special, own[0], text.tokens - 1]) if one != text.pad]

        def reads(fills: Sequence[int], ahead: bool = False) -> list[bool | None]:
            return [_reads_texts(*each, text, tokens, fills, ahead) for each in functions]

        functions = [(model, name) for model in models for name in _functions(model)]
        expands = any(type(part).__name__ == SCORES_EXPANSIONS for part in models[0].modules())
        padding, of_others, ahead = reads([text.pad]), reads(others), reads([text.pad, *others], ahead=True)
        untried = bool(functions) and {*padding} == {None}
        return cls(True in padding, expands or True in of_others, True in ahead, untried)

    @classmethod
    def of_clips(cls, models: Sequence[nn.Module], tower: nn.Module, spec: BufferSpec) -> "PaddingConsumers":
        """Run models around a tower on three short clips: with its outputs for padding, and with zeros there.

        Their functions for features are tried, such as `get_audio_features`, and their forwards, with noise and a mask
        and two tokens for a decoder. What they make of the frames of a clip is told by a run of the clip alone. They
        run as those around texts do.

        Args:
            models: The models, the outermost first.
            tower: The tower inside of them.
            spec: How graphs take its clips and give its frames.
        """
        if not models:
            return cls()
        models, tower = _shadows(models, tower)
        clips = _Clips(tower, spec)
        told: dict[str, bool | None] = {}
        with torch.no_grad():
            for model in models:
                for name in _functions(model):
                    if told.get(name) is None:
                        told[name] = clips.are_read_by(model, name)
        return cls(padding=True in told.values(), untried=bool(told) and {*told.values()} == {None})

    @property
    def reason(self) -> str:
        """Return the reason why calls with padding that matters run eager."""
        return MAY_READ if self.untried else READS_AROUND

    def matters(self, ids: Tensor, mask: Tensor | None, pad: int) -> bool:
        """Return True if a call with padding on the right may need the outputs for that.

        If any call may, syncs with the device of the mask, or with that of the token ids if these count.
        """
        always = self.padding or self.untried
        if mask is None or not ids.numel() or not (always or self.other_ids):
            return False
        real = mask != 0 if always else mask.to(ids.device) != 0
        outside = ~real if always else ~real & (ids != pad)
        return bool(outside.any() & real[:, 0].all())


NOTHING = PaddingConsumers()


def modules_around(tower: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have a tower inside, the outermost first."""
    return [one for one in model.modules() if one is not tower and any(part is tower for part in one.modules())]


def reads_padding(
    tower: nn.Module,
    run: Callable[[], Any],
    cleared: Callable[[Any, Mapping[str, Any]], Any],
    real: Callable[[list[Tensor]], list[Tensor]],
) -> bool | None:
    """Return True if what a run of a model gives differs where its tower leaves zeros for padding.

    Args:
        tower: The tower inside of the model.
        run: Runs the model. Runs uncompiled, and no index may be out of range.
        cleared: Returns an output of the tower as graphs leave it, from that and the arguments of the call.
        real: Returns the parts of the tensors that are given which mean something.

    Returns:
        `None` if it cannot be told: the model does not run, does not repeat itself or does not call the tower.
    """
    calls = []
    own = tower.forward
    parameters = inspect.signature(own)

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return cleared(own(*args, **kwargs), parameters.bind(*args, **kwargs).arguments)

    def given() -> list[Tensor]:
        return real([leaf for leaf in tree_leaves(run_under(run, CheckedIndices())) if isinstance(leaf, Tensor)])

    try:
        expected, again = given(), given()
    except Exception:  # of the model's own code
        return None
    if not _close(expected, again):
        return None
    before = vars(tower).get("forward")
    tower.forward = forward  # no hook, because sentence-transformers calls it
    try:
        other = given()
    except Exception:  # it reads zeros that it does not take
        return True
    finally:
        del tower.forward
        if before is not None:
            tower.forward = before
    return not _close(expected, other) if calls else None


def _shadows(models: Sequence[nn.Module], tower: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Return copies of models, the outermost first, and of the tower inside of them, in evaluation mode."""
    shadow = Shadow(models[0])
    for part in shadow.module.modules():
        part.training = False
    return [shadow.of(one) for one in models], shadow.of(tower)


def _reads_texts(
    model: nn.Module, name: str, text: TextProbe, tokens: Sequence[int], fills: Sequence[int], ahead: bool
) -> bool | None:
    """Return True if a function of a model reads what its encoder makes of padding with these ids, on one side.

    `None` if it cannot be told.
    """
    function = getattr(model, name) if name != "forward" else model
    if not (isinstance(model, nn.Sequential) or _takes(getattr(model, name), (IDS, MASK))):
        return None
    short = len(tokens) // 2
    own, more = [*tokens[-short:]], len(tokens) - short
    padded = [[fill] * more + own if ahead else own + [fill] * more for fill in fills]
    ids = torch.tensor([[*tokens], *padded], device=text.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1:, slice(more) if ahead else slice(short, None)] = False
    together = _reads_batch(function, text.tower, ids, real)
    if together is not None:
        return together
    single = [_reads_batch(function, text.tower, *one) for one in zip(ids[:, None], real[:, None], strict=True)]
    return None if None in single and True not in single else True in single  # it may take single texts alone


def _reads_batch(function: Callable[..., Any], encoder: nn.Module, ids: Tensor, real: Tensor) -> bool | None:
    """Return True if a function of a model reads the padding of a batch of texts; `None` if it cannot be told.

    Models for multiple choice take texts as `[batch, choices, length]`.
    """

    def has_padding(tensor: Tensor) -> bool:
        return tensor.shape[:2] == real.shape and tensor.is_floating_point()

    def cleared(tensor: Tensor) -> Tensor:
        outside = ~real.view(*real.shape, *[1] * (tensor.dim() - 2))
        return tensor.masked_fill(outside, 0) if has_padding(tensor) else tensor

    for shape in (ids.shape, (1, *ids.shape)):
        call = {IDS: ids.view(shape), MASK: real.long().view(shape), **_for_decoder(function, ids)}
        found = reads_padding(
            encoder,
            partial(function, call) if isinstance(function, nn.Sequential) else partial(function, **call),
            lambda output, _: tree_map_only(Tensor, cleared, output),
            lambda tensors: [tensor[real] if has_padding(tensor) else tensor for tensor in tensors],
        )
        if found is not None:
            return found
    return None


class _Clips:
    """Clips to try around a tower, and how graphs leave its frames."""

    def __init__(self, tower: nn.Module, spec: BufferSpec) -> None:
        self.tower = tower
        self.rows = spec.row_input
        self.mask: Any = spec.layout
        fields = spec.outputs.fields.values() if isinstance(spec.outputs, Fields) else [spec.outputs]
        self.frames = [one.of_item for one in fields if isinstance(one, Entries)]
        device = device_of(tower)
        lengths = [count * getattr(spec.layout, "shortest", 1) for count in FRAMES]
        self.lengths = torch.tensor(lengths, device=device)
        self.real = real_rows(self.lengths, max(lengths))
        shape = max(lengths), *(spec.row_input.shape or ())
        batch = torch.randn(len(lengths), *shape, generator=torch.Generator().manual_seed(0), device="cpu")
        batch[1, lengths[1] :] = 0
        self.batch = batch.to(device, module_dtype(tower))

    def are_read_by(self, model: nn.Module, name: str) -> bool | None:
        """Return True if a function of a model reads what the tower makes of their padding; `None` if none can tell."""
        function = getattr(model, name)
        call = self._arguments(function)
        if call is None:
            return None
        run = model if name == "forward" else function
        try:
            sizes = [
                [leaf.shape for leaf in tree_leaves(run(**self._alone(call, at))) if isinstance(leaf, Tensor)]
                for at in range(len(self.lengths))
            ]
        except Exception:  # of the model's own code: it may take no clip so short
            sizes = []
        return reads_padding(self.tower, partial(run, **call), self._cleared, partial(_within, sizes))

    def _arguments(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        """Return the arguments of a call of a function with the clips; `None` if it takes others."""
        parameters = inspect.signature(function).parameters.values()
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        masks = [one.name for one in named if _is_mask(one.name)]
        first = next((one.name for one in named if not _is_mask(one.name)), None)
        rows = self.rows.name if any(one.name == self.rows.name for one in named) else first
        if not masks and rows is None and _takes(function, (self.rows.name, self.mask.name)):
            return {self.rows.name: self.batch, self.mask.name: self.real.to(self.mask.dtype)}
        if rows is None or not masks:
            return None
        mask = next((one for one in masks if one in (self.mask.name, f"{rows}_mask")), masks[0])
        call = {rows: self.batch, mask: self.real.to(self.mask.dtype), **_for_decoder(function, self.batch)}
        needed = {one.name for one in named if one.default is one.empty}
        return call if needed <= call.keys() else None

    def _alone(self, call: Mapping[str, Tensor], at: int) -> dict[str, Tensor]:
        """Return the call for one clip, without padding."""
        length, longest = int(self.lengths[at]), self.batch.shape[1]
        own = {name: value[at : at + 1] for name, value in call.items()}
        return {name: value[:, :length] if value.shape[1] == longest else value for name, value in own.items()}

    def _cleared(self, output: Any, arguments: Mapping[str, Any]) -> Any:
        """Return an output of the tower with zeros past the frames of each clip, if the call told them apart."""
        mask = arguments.get(self.mask.name)
        if mask is None:
            return output
        rows = (mask != 0).sum(1).tolist()

        def cleared(tensor: Tensor) -> Tensor:
            for count in self.frames:
                if tensor.dim() > 1 and tensor.shape[:2] == (len(rows), count(mask.shape[1])):
                    frames = torch.tensor([count(one) for one in rows], device=tensor.device)
                    real = real_rows(frames, tensor.shape[1])
                    return tensor.masked_fill(~real.view(*real.shape, *[1] * (tensor.dim() - 2)), 0)
            return tensor

        return tree_map_only(Tensor, cleared, output)


def _functions(model: nn.Module) -> list[str]:
    """Return the names of the functions for features of a module, and of its forward, if it is more than a list."""
    kind, (start, end) = type(model), FEATURES
    features = [name for name in dir(kind) if name.startswith(start) and name.endswith(end)]
    return [*features, *(["forward"] if kind.forward is not nn.Module.forward else [])]


def _takes(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return True if a function takes arguments of these names, by themselves or with all others."""
    parameters = inspect.signature(function).parameters
    return any(one.kind is one.VAR_KEYWORD for one in parameters.values()) or {*names} <= parameters.keys()


def _for_decoder(function: Callable[..., Any], batch: Tensor) -> dict[str, Tensor]:
    """Return two tokens for each item of a batch, if a function takes such."""
    if DECODED not in inspect.signature(getattr(function, "forward", function)).parameters:
        return {}
    return {DECODED: torch.ones(len(batch), 2, dtype=torch.long, device=batch.device)}


def _is_mask(name: str) -> bool:
    return name.endswith("mask") and not name.startswith(("output", "decoder", "head", "cross"))


def _within(sizes: Sequence[Sequence[torch.Size]], tensors: list[Tensor]) -> list[Tensor]:
    """Return the parts of tensors of a batch that each item has when it comes alone, and other tensors whole."""
    if not sizes or any(len(own) != len(tensors) for own in sizes):
        return tensors
    parts = []
    for tensor, *alone in zip(tensors, *sizes, strict=True):
        if tensor.dim() and len(tensor) == len(sizes) and all(own[:1] == (1,) for own in alone):
            parts += [item[tuple(map(slice, own[1:]))] for item, own in zip(tensor, alone, strict=True)]
        else:
            parts.append(tensor)
    return parts


def _close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    same = [one.shape == other.shape for one, other in zip(some, others, strict=True)]
    return all(same) and all(
        torch.allclose(one, other, equal_nan=True) for one, other in zip(some, others, strict=True)
    )
