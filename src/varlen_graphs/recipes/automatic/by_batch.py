"""Recipe for any module that takes a batch of inputs of one size: its own forward, declared by running it."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, VarlenGraphsError
from varlen_graphs.inputs.extra import PerItem
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.recipes.automatic.batch_probe import FEW, BatchProbe
from varlen_graphs.recipes.automatic.fixed_sizes import (
    INPUTS,
    Shape,
    item_shapes,
    optional_inputs,
    required_inputs,
)
from varlen_graphs.recipes.inspection import never_reads
from varlen_graphs.recipes.modes.cached_tables import CachedTable, cached_tables, why_changed
from varlen_graphs.recipes.probe import RUN_ERRORS, UnknownCallError, tolerance_of
from varlen_graphs.recipes.towers import check_loaded, device_of
from varlen_graphs.shadows.shadow import Shadow

HEAD_MASK = "head_mask"
"""Argument of transformers 4 that leaves out heads of attention; calls that bring one run eager."""


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
        batched.tolerance = tolerance_of(options)
        spec = batched.declare()
    except UnknownCallError as error:
        raise UnknownCallError(f"{type(tower).__name__} cannot be graphed by batch: {error}") from error
    except (VarlenGraphsError, *RUN_ERRORS) as error:
        raise SpecError(f"{type(tower).__name__} cannot be graphed by batch: {error}") from error
    if tables:
        options = {"eager_if": partial(why_changed, tables)} | options
    return GraphedEncoder(tower, budgets, spec, forward=batched.function, **options)


class _Batched(BatchProbe):
    """A tower, and what it is to be called with by its configuration.

    The declaration of the batch has the shape of an input if masks of the inputs are declared, or bytes.
    """

    def __init__(
        self, tower: nn.Module, tables: list[CachedTable], shape: Sequence[int] | None, inputs: Sequence[PerItem],
        normalize: Normalize | None,
    ) -> None:  # fmt: skip
        super().__init__(tower, tables)
        self.dtype = module_dtype(tower)
        parameters = self.takes
        self.takes_hidden_states = self.accepts(OUTPUT_HIDDEN_STATES)
        self.name = next(iter(parameters), "")
        kind = self.name if self.name in INPUTS else str(getattr(tower, "main_input_name", ""))
        if shape is None and kind not in INPUTS:
            raise UnknownCallError(
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
                self.run_items(FEW)
            except RUN_ERRORS as error:
                refusals.append(f"for {self.name} {[FEW, *self.shape]} it raises {error!r}")
            else:
                return self.shape
        raise UnknownCallError(refusals[0])

    def _takes(self, one: PerItem) -> bool:
        """Return True if the tower runs with a tensor of this shape."""
        tensor = torch.full((FEW, *one.shape), float(one.default or 0), device="cpu").to(
            self.device, one.dtype or self.dtype
        )
        try:
            self.run_items(FEW, {one.name: tensor})
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

    def _random(self, shape: Sequence[int], count: int, first: int) -> Tensor:
        draws = [
            torch.randn(*shape, generator=torch.Generator().manual_seed(first + at), device="cpu")
            for at in range(count)
        ]
        return torch.stack(draws).to(self.device, self.dtype)
