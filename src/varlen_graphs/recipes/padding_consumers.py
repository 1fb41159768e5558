"""Find out by trying whether a model around a tower reads the tower's outputs for padding, where graphs leave zeros."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial, wraps
from itertools import cycle, islice, product
from numbers import Number
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.padded import real_rows
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries
from varlen_graphs.recipes.texts.text_probe import IDS, MASK, TYPES, TextProbe
from varlen_graphs.recipes.towers import device_of
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices
from varlen_graphs.torch_dispatch.thread_modes import run_under

LENGTH = 41
"""Tokens of a text without padding, if the encoder takes more: as many as there is unlikely another size."""

FRAMES = (40, 24, 24)
"""Frames of the clips to try, which heads may pool by tens. The second is padded with zeros, the last with noise."""

SCORES_EXPANSIONS = "MultiVectorMask"
"""Part of multi-vector models of sentence-transformers: scores tokens that expand a query, outside of the mask."""

FEATURES = ("get_", "_features")
"""Start and end of the names of methods by which models of transformers hand out what they make of their towers."""

DECODED = "decoder_input_ids"
"""Argument of models that decode what their tower encodes."""

LIBRARIES = ("torch", "transformers", "sentence_transformers", "peft")
"""Packages whose modules reach a tower alike by their functions for features, their forwards and others."""

LOGITS = "logits"
"""Field of outputs of transformers of which callers decode all frames."""

PLAIN = (bool, int, float, str)
"""Classes of arguments whose values count."""

VALUES = (Tensor, Number, numpy.ndarray)
"""Classes of what a model may give."""

Function = tuple[str, int, str]
"""File, first line and name of a function, which `torch.compile` keeps when it rewrites its code."""

Caller = tuple[Function, frozenset[tuple[str, Any]]]
"""A function of a module around a tower, and its arguments: plain values, and the names of the classes of others."""

READS_AROUND = "padding whose outputs are read by the model around the encoder"
MAY_READ = (
    "padding whose outputs the model around the tower may read: vg.wrap knew no call to try that comes here so; if it "
    "reads none, wrap the tower alone, as in vg.wrap(model.encoder)"
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
        own: Functions of the modules around it that are of no library, any of which may call it.
        tried: Those that called the tower and read nothing, with the arguments that they had.
    """

    padding: bool = False
    other_ids: bool = False
    ahead: bool = False
    untried: bool = False
    own: frozenset[Function] = frozenset()
    tried: frozenset[Caller] = frozenset()

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
        tokens = [*islice(cycle(own), min(LENGTH, (text.largest or 2 * LENGTH) - 3) - 1), end]
        others = [one for one in dict.fromkeys([*text.special, own[0], text.tokens - 1]) if one != text.pad]

        tries = _Tries(models)

        def reads(fills: Sequence[int], ahead: bool = False) -> list[bool | None]:
            def reads_function(model: nn.Module, name: str, called: Callable[[], object]) -> bool | None:
                return _reads_texts(model, name, called, text, tokens, fills, ahead)

            return tries.all(reads_function)

        expands = any(type(part).__name__ == SCORES_EXPANSIONS for part in models[0].modules())
        padding, of_others, before = reads([text.pad]), reads(others), reads([text.pad, *others], ahead=True)
        other_ids, ahead = (_any_more(found, padding) for found in (of_others, before))
        return cls(True in padding, expands or other_ids, ahead, tries.missed(padding), tries.own, tries.tried)

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
        clips, tries = _Clips(tower, spec), _Tries(models)
        with torch.no_grad():
            told = tries.all(clips.are_read_by)
        return cls(True in told, untried=tries.missed(told), own=tries.own, tried=tries.tried)

    def of_any(self) -> str | None:
        """Return the reason why a call made now runs eager if it has padding; `None` if its outputs are not read.

        Looks at the functions that are running, where modules of no library are around the tower.
        """
        return READS_AROUND if self.padding else self._why_untried()

    def of_texts_on_left(self) -> str | None:
        """Return the same of padding on the left."""
        return READS_AROUND if self.ahead else self._why_untried()

    def _why_untried(self) -> str | None:
        caller = _caller(self.own)
        return MAY_READ if self.untried or not (caller is None or caller in self.tried) else None

    def of_call(self, ids: Tensor, mask: Tensor | None, pad: int) -> str | None:
        """Return the same of a call, if it has padding on the right that may matter.

        If any call may, syncs with the device of the mask, or with that of the token ids if these count.
        """
        if mask is None or not ids.numel():
            return None
        reason = self.of_any()
        if reason is None and not self.other_ids:
            return None
        real = mask != 0 if reason else mask.to(ids.device) != 0
        outside = ~real if reason else ~real & (ids != pad)
        return reason or READS_AROUND if bool(outside.any() & real[:, 0].all()) else None


NOTHING = PaddingConsumers()


def modules_around(tower: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have a tower inside, the outermost first."""
    return [one for one in model.modules() if one is not tower and any(part is tower for part in one.modules())]


def reads_padding(
    tower: nn.Module,
    run: Callable[[], Any],
    cleared: Callable[[Any, Mapping[str, Any]], Any],
    real: Callable[[list[Tensor]], list[Tensor]],
    called: Callable[[], object],
) -> bool | None:
    """Return True if what a run of a model gives differs where its tower leaves zeros for padding.

    Args:
        tower: The tower inside of the model.
        run: Runs the model. Runs uncompiled, and no index may be out of range.
        cleared: Returns an output of the tower as graphs leave it, from that and the arguments of the call.
        real: Returns the parts of the tensors that are given which mean something.
        called: Called whenever the tower is.

    Returns:
        `None` if it cannot be told: the model does not run, does not repeat itself, does not call the tower or gives
        nothing in floating point.
    """
    calls = []
    own = tower.forward
    parameters = inspect.signature(own)

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(called())
        return cleared(own(*args, **kwargs), parameters.bind(*args, **kwargs).arguments)

    def given() -> list[Tensor]:
        return real(_tensors_of(run_under(run, CheckedIndices())))

    try:
        expected, again = given(), given()
    except Exception:  # of the model's own code
        return None
    if not _close(expected, again) or not any(map(torch.is_floating_point, expected)):  # classes may hide it
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


def _tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of an output, and its numbers and arrays as such."""
    values = (leaf for leaf in tree_leaves(output) if isinstance(leaf, VALUES))
    return [one if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu") for one in values]


def _shadows(models: Sequence[nn.Module], tower: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Return copies of models, the outermost first, and of the tower inside of them, in evaluation mode."""
    shadow = Shadow(models[0])
    for part in shadow.module.modules():
        part.training = False
    return [shadow.of(one) for one in models], shadow.of(tower)


def _reads_texts(
    model: nn.Module, name: str, called: Callable[[], object], text: TextProbe, tokens: Sequence[int],
    fills: Sequence[int], ahead: bool,
) -> bool | None:  # fmt: skip
    """Return True if a function of a model reads what its encoder makes of padding with these ids, on one side.

    `None` if it cannot be told.
    """
    function = getattr(model, name) if name != "forward" else model
    if not (isinstance(model, nn.Sequential) or _takes(getattr(model, name), (IDS, MASK))):
        return None
    count = len(tokens)
    padded = [(count, text.pad), *product((count // 2, count - 1), fills)]  # tokens of a text, and what pads it
    rows, marks = [], []
    for short, fill in padded:
        parts = [*tokens[-short:]], [fill] * (count - short)
        mark = [True] * short, [False] * (count - short)
        rows.append(parts[ahead] + parts[not ahead])
        marks.append(mark[ahead] + mark[not ahead])
    ids, real = torch.tensor(rows, device=text.device), torch.tensor(marks, device=text.device)
    together = _reads_batch(function, text.tower, ids, real, called)
    if together is not None:
        return together
    alone = zip(ids[:, None], real[:, None], strict=True)
    single = [_reads_batch(function, text.tower, *one, called) for one in alone]
    return None if None in single and True not in single else True in single  # it may take single texts alone


def _reads_batch(
    function: Callable[..., Any], encoder: nn.Module, ids: Tensor, real: Tensor, called: Callable[[], object]
) -> bool | None:
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
            called,
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

    def are_read_by(self, model: nn.Module, name: str, called: Callable[[], object]) -> bool | None:
        """Return True if a function of a model reads what the tower makes of their padding; `None` if none can tell.

        Callers decode the logits of all frames, and see of other outputs the frames of each clip.
        """
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
        found = reads_padding(self.tower, partial(run, **call), self._cleared, partial(_within, sizes), called)
        if found is False and (
            whole := reads_padding(self.tower, partial(_logits, run, call), self._cleared, list, called)
        ):
            return whole
        return found

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


class _Tries:
    """Functions to try of models around a tower, with what runs of them show.

    Args:
        models: The models, the outermost first.

    Attributes:
        own: See `PaddingConsumers`.
        tried: Likewise, of those so far.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._own = [model for model in models if not _is_of_library(type(model).__module__)]
        self.own = frozenset(_function(code) for model in self._own for code in _codes(model))
        self.tried: frozenset[Caller] = frozenset()
        self._functions = [(model, name) for model in models for name in _functions(model)]

    def all(self, reads: Callable[[nn.Module, str, Callable[[], object]], bool | None]) -> list[bool | None]:
        """Return what each function tells, with what is to be called whenever it calls the tower."""
        told = []
        for model, name in self._functions:
            callers: list[Caller | None] = []
            told.append(reads(model, name, partial(self._note, callers)))
            if told[-1] is False:
                self.tried |= {one for one in callers if one is not None}
        return told

    def _note(self, callers: list[Caller | None]) -> None:
        callers.append(_caller(self.own))

    def missed(self, told: Sequence[bool | None]) -> bool:
        """Return True if no model told anything, or one that is of no library tells nothing of its forward.

        Unless a model around it does. In those of libraries, functions for features tell of the forward, too.
        """
        for (model, name), one in zip(self._functions, told, strict=True):
            decides = name == "forward" or model not in self._own
            if decides and (one is not None or model in self._own):
                return one is None
        return bool(self._functions)


def _codes(model: nn.Module) -> Iterator[CodeType]:
    """Yield the code of all functions of a module that are of no library."""
    for owner in (model, *(kind for kind in type(model).__mro__ if not _is_of_library(kind.__module__))):
        for one in [*vars(owner).values()]:
            if isinstance(one, staticmethod | classmethod | MethodType):
                one = one.__func__
            elif isinstance(one, property | cached_property):
                one = one.fget if isinstance(one, property) else one.func
            if isinstance(one, FunctionType) and isinstance(inner := inspect.unwrap(one), FunctionType):
                yield inner.__code__


def _function(code: CodeType) -> Function:
    return code.co_filename, code.co_firstlineno, code.co_name


def _caller(own: Collection[Function]) -> Caller | None:
    """Return the outermost of these functions that is running, and its arguments; `None` if none is.

    Without token types, which towers take for themselves.
    """
    found, frame = None, inspect.currentframe() if own else None
    while frame is not None:
        found = frame if _function(frame.f_code) in own else found
        frame = frame.f_back
    if found is None:
        return None
    names, varargs, keywords, values = inspect.getargvalues(found)  # of this frame alone: that keeps its values alive
    named = {name: values.get(name) for name in names[1:]} | (values.get(keywords) or {} if keywords else {})
    given = {(name, _plain(one)) for name, one in named.items() if one is not None and name != TYPES}
    more = (("*", _plain(one)) for one in (values.get(varargs) or () if varargs else ()))
    return _function(found.f_code), frozenset((*given, *more))


def _plain(value: Any) -> Any:
    kind = type(value)
    return value if isinstance(value, PLAIN) else f"{kind.__module__}.{kind.__qualname__}"


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _any_more(told: Sequence[bool | None], before: Sequence[bool | None]) -> bool:
    """Return True if a function reads something, or tells no more what it told before."""
    return True in told or any(one is None and other is False for one, other in zip(told, before, strict=True))


def _logits(run: Callable[..., Any], call: Mapping[str, Tensor]) -> Any:
    output = run(**call)
    return output.get(LOGITS) if isinstance(output, Mapping) else None


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
