"""Recipe for any module that takes a batch of inputs of one size: its own forward, declared by running it."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.dispatch.rules_mode import CaptureRulesMode
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import CaptureError, SpecError, VarlenGraphsError
from varlen_graphs.inputs.extra import PerItem
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.batch import Batch
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.recipes.fixed_sizes import INPUTS, Shape, item_shapes, optional_inputs, required_inputs
from varlen_graphs.recipes.inspection import RUN_ERRORS, declare, itself, never_reads
from varlen_graphs.recipes.modes.cached_tables import CachedTable, cached_tables, reads_copies, why_changed
from varlen_graphs.recipes.modes.skip_mask_checks import keeps_masks
from varlen_graphs.recipes.rounding import difference
from varlen_graphs.recipes.towers import check_loaded, device_of
from varlen_graphs.shadows.shadow import Shadow

HEAD_MASK = "head_mask"
"""Argument of transformers 4 that leaves out heads of attention; calls that bring one run eager."""

FEW, MORE = 2, 3
"""Sizes of the batches to run: a dimension that is 2 in one and 3 in the other is that of the batch."""


def by_batch(
    tower: nn.Module,
    budgets: Budgets | None = None,
    *,
    shape: Sequence[int] | None = None,
    inputs: Sequence[PerItem] = (),
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph a tower that takes a batch of images, videos or spectrograms of one size: ViT, CLIP, Whisper and the like.

        encoder = vg.recipes.by_batch(model.vision_tower)
        features = encoder(pixel_values, output_hidden_states=True).hidden_states[-2]

    This function runs the tower on two and three random inputs, infers the extents of its outputs, and checks that no
    output depends on the other inputs of a batch and that the tower can be captured. The hidden states of its layers
    are declared, if it returns them when it is asked, so calls with `output_hidden_states=True` are graphed too. The
    encoder is called as the tower is. Each size of the inputs gets graphs of its own, see `Batch`.

    The runs are those of a copy that shares its weights, on the device of the tower, and sync with the host.

    Args:
        tower: The tower, on its device, in its dtype, and in evaluation mode.
        budgets: Batch sizes; `None` is `[1, 2, 4, 8, 16, 32]`. A larger batch takes several replays.
        shape: Shape of one input, such as `(3, 224, 224)`, to run the tower on. `None` takes it from the configuration,
            for a tower whose first argument is `pixel_values`, `pixel_values_videos`, `input_features` or
            `input_values`.
        inputs: Tensors with an entry for each input that calls bring beside them. Those of Mllama and Qwen2-Audio are
            known.
        normalize: If given, inputs are images as bytes, normalised inside the graph, see `Normalize`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: The tower accepts no such batch, an output depends on several inputs, or it cannot be captured. The
            message names the argument, the output or the line.
    """
    check_loaded(tower)
    try:
        tables = [*cached_tables(tower, device_of(tower))]
        batched = _Batched(Shadow(tower).module, tables, shape, inputs, normalize)
        spec = _declare(batched)
    except (VarlenGraphsError, *RUN_ERRORS) as error:
        raise SpecError(f"{type(tower).__name__} cannot be graphed by batch: {error}") from error
    if tables:
        options = {"eager_if": partial(why_changed, tables)} | options
    return GraphedEncoder(tower, budgets, spec, forward=batched.function, **options)


class _Batched:
    """A tower to run, and what it is to be called with.

    Attributes:
        tables: Host tensors that the tower keeps, which a shadow shares.
        function: Function to capture in place of the tower; `None` for the tower itself.
        rows: Declaration of the batch; it has the shape of an input if masks of the inputs are declared, or bytes.
    """

    def __init__(
        self, tower: nn.Module, tables: list[CachedTable], shape: Sequence[int] | None, inputs: Sequence[PerItem],
        normalize: Normalize | None,
    ) -> None:  # fmt: skip
        self.tower = tower
        self.forward = tower.forward
        self.device = device_of(tower)
        self.tables = tables
        self.function = reads_copies(self.tables, itself(self.forward)) if self.tables else None
        self.dtype = module_dtype(tower)
        parameters = inspect.signature(self.forward).parameters
        self.takes_hidden_states = OUTPUT_HIDDEN_STATES in parameters or any(
            one.kind is one.VAR_KEYWORD for one in parameters.values()
        )
        self.name = next(iter(parameters), "")
        kind = self.name if self.name in INPUTS else str(getattr(tower, "main_input_name", ""))
        if shape is None and kind not in INPUTS:
            raise SpecError(
                f"its forward takes {list(parameters)}: expected one of {INPUTS} first; if its first argument is a "
                "batch, call vg.recipes.by_batch(tower, shape=...) with the shape of one input"
            )
        self.inputs = [*inputs]
        self.shape = self._accepted(item_shapes(tower, kind) if shape is None else [tuple(shape)], parameters)
        declared = [HEAD_MASK, *(one.name for one in self.inputs)]
        masks = [name for name in parameters if "mask" in name and name not in declared]
        self.ignored = [name for name in masks if never_reads(self.forward, name)]
        used = {*masks} - {*self.ignored}
        masks_of_shape = [one for one in optional_inputs(tower, self.shape) if one.name in used and self._takes(one)]
        self.inputs += masks_of_shape
        has_shape = bool(masks_of_shape) or normalize is not None
        self.rows = InputRows.pictures(self.name, self.shape if has_shape else None, normalize)
        used -= {one.name for one in self.inputs}
        if used and shape is None and kind == "input_features":
            raise SpecError(
                f"it takes {sorted(used)}: clips of several lengths are no batch; for clips of one length call "
                "vg.recipes.by_batch(tower, shape=...)"
            )

    def _accepted(self, shapes: Iterable[Shape], parameters: Mapping[str, inspect.Parameter]) -> Shape:
        """Return the first shape with which the tower runs; declares the inputs that it requires beside it."""
        needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        declared, refusals, how = self.inputs, [], "vg.recipes.by_batch(tower, ...)"
        for self.shape in shapes:
            known = required_inputs(self.shape)
            self.inputs = declared or [known[name] for name in needed if name in known]
            missing = [name for name in needed if name not in {self.name, *(one.name for one in self.inputs)}]
            if missing:
                refusals.append(f"it requires {missing} too: pass {how} with inputs=[vg.inputs.PerItem(...)] for them")
                continue
            try:
                self.run(FEW)
            except RUN_ERRORS as error:
                refusals.append(f"for {self.name} {[FEW, *self.shape]} it raises {error!r}")
            else:
                return self.shape
        raise SpecError(refusals[0])

    def _takes(self, one: PerItem) -> bool:
        """Return True if the tower runs with a tensor of this shape."""
        tensor = torch.full((FEW, *one.shape), float(one.default or 0), device="cpu").to(
            self.device, one.dtype or self.dtype
        )
        try:
            self.run(FEW, {one.name: tensor})
        except RUN_ERRORS:
            return False
        return True

    def example(self, count: int, first: int = 0) -> dict[str, Any]:
        """Return the arguments of a call: so many random inputs from the `first` on, the same each time."""
        arguments: dict[str, Any] = {self.name: self._random(self.shape, count, first)}
        for one in self.inputs:
            is_index = one.default is None and one.dtype is not None and not one.dtype.is_floating_point
            value = float(is_index if one.default is None else one.default)
            arguments[one.name] = torch.full((count, *one.shape), value, device="cpu").to(
                self.device, one.dtype or self.dtype
            )
        return arguments

    def run(self, count: int, asked: Mapping[str, Any] | None = None, first: int = 0) -> Any:
        """Return the output of the tower's own forward for so many inputs, with some arguments more."""
        with torch.no_grad():
            return self.forward(**self.example(count, first) | dict(asked or {}))

    def _random(self, shape: Sequence[int], count: int, first: int) -> Tensor:
        draws = [
            torch.randn(*shape, generator=torch.Generator().manual_seed(first + at), device="cpu")
            for at in range(count)
        ]
        return torch.stack(draws).to(self.device, self.dtype)


def _declare(tower: _Batched) -> BufferSpec:
    """Return the declaration of a tower, checked."""
    outputs = _outputs(tower, {})
    try:
        _check_capture(tower, {})
    except CaptureError:
        run = keeps_masks(itself(tower.forward))
        tower.function = reads_copies(tower.tables, run) if tower.tables else run
        _check_capture(tower, {})
        _check_masks(tower, outputs)
    if isinstance(outputs, Fields) and tower.takes_hidden_states and HIDDEN_STATES not in outputs.fields:
        states = _hidden_states(tower, outputs)
        outputs = Fields(**outputs.fields, **states)
    return BufferSpec(
        tower.rows,
        Batch(usual=tower.shape),
        outputs=outputs,
        inputs=tower.inputs,
        ignored=tower.ignored,
        declared_by="recipe",
    )


def _outputs(tower: _Batched, asked: Mapping[str, Any]) -> Declared:
    """Return the declaration of the outputs of calls with these arguments.

    Raises:
        SpecError: An output has no entry for each input, or depends on other inputs of the batch.
    """
    runs = [tower.run(count, asked) for count in (FEW, MORE)]
    declared, unknown = declare(runs, [Layout(((1, 1, 1),) * count) for count in (FEW, MORE)], ())
    if unknown:
        raise SpecError(f"its outputs {unknown} have no entry for each input of a batch")
    _check_alone(tower, runs[1], declared, asked)
    return declared


def _hidden_states(tower: _Batched, outputs: Fields) -> dict[str, Declared]:
    """Return the declaration of the hidden states; empty if calls that ask for them have to run eager."""
    asked = {OUTPUT_HIDDEN_STATES: True}
    try:
        declared = _outputs(tower, asked)
        _check_capture(tower, asked)
    except (VarlenGraphsError, *RUN_ERRORS):
        return {}
    fields = declared.fields if isinstance(declared, Fields) else {}
    if fields.keys() != {*outputs.fields, HIDDEN_STATES}:  # only this field may come and go
        return {}
    states = fields[HIDDEN_STATES]
    layers = states if isinstance(states, Sequence) else [states]
    return {HIDDEN_STATES: Rows() if all(layer == Rows() for layer in layers) else states}


def _check_alone(tower: _Batched, output: Any, declared: Declared, asked: Mapping[str, Any]) -> None:
    """Check that the last input of a batch has the same outputs alone."""
    last = MORE - 1
    parts = flatten(output, declared)
    alone = flatten(tower.run(1, asked, last), declared)
    for whole, part, extent, path in zip(parts.tensors, alone.tensors, parts.extents, parts.paths, strict=True):
        dim = extent.rows_dim
        of_last = whole.narrow(dim, whole.shape[dim] // MORE * last, whole.shape[dim] // MORE)
        name = ".".join(map(str, path)) or "output"
        if part.shape != of_last.shape:
            raise SpecError(f"its {name} is {list(part.shape)} for one input and {list(whole.shape)} for {MORE}")
        if difference(part, of_last) is not None:
            raise SpecError(
                f"its {name} for an input depends on the other inputs of the batch, or on chance: call .eval() first"
            )


def _check_capture(tower: _Batched, asked: Mapping[str, Any]) -> None:
    """Check a run against the rules of CUDA graph capture."""
    example = tower.example(FEW)
    run = tower.forward if tower.function is None else partial(tower.function, tower.tower)
    if tower.tables:
        with torch.no_grad():
            run(**example, **asked)  # which copies them
    rules = CaptureRulesMode(tower.device, "it")
    rules.watch(lambda: run(**example, **asked))


def _check_masks(tower: _Batched, declared: Declared) -> None:
    """Check that masks that mask nothing change no output: transformers leaves them out."""
    example = tower.example(FEW)
    assert tower.function is not None  # noqa: S101 - the caller has set it
    with torch.no_grad():
        kept, without = tower.function(tower.tower, **example), tower.forward(**example)
    parts = zip(flatten(kept, declared).tensors, flatten(without, declared).tensors, strict=True)
    if any(difference(one, other) is not None for one, other in parts):
        raise SpecError(
            "transformers leaves out its mask in calls that mask nothing, which changes the output, because its "
            "attention is causal without one; tower.config._attn_implementation = 'eager' takes the mask in all calls"
        )
