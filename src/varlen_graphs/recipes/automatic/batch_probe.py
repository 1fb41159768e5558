"""A tower that takes a batch of items of one size, and its declaration, found by running it on a few of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.parts import part_in_training
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.errors import CaptureError, SpecError, VarlenGraphsError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.batch import Batch
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.recipes.automatic.fused_batch import FUSED
from varlen_graphs.recipes.fused import fused_or
from varlen_graphs.recipes.inspection import declare
from varlen_graphs.recipes.modes.cached_tables import CachedTable, reads_copies
from varlen_graphs.recipes.modes.skip_mask_checks import keeps_masks
from varlen_graphs.recipes.probe import RUN_ERRORS, TowerProbe, itself, why_not
from varlen_graphs.recipes.rounding import difference

FEW, MORE = 2, 3
"""Sizes of the batches to run: a dimension that is 2 in one and 3 in the other is that of the batch."""


class BatchProbe(TowerProbe):
    """A tower to run on small batches. Subclasses know the arguments.

    Args:
        tower: The tower: a shadow, which runs may change.
        tables: Host tensors that it keeps, which a shadow shares.

    Attributes:
        tables: As given.
        name: Name of the argument that holds the batch.
        function: Function to capture in place of the tower; `None` for the tower itself.
        rows: Declaration of the batch.
        shape: Shape of one item.
        inputs: Declarations of tensors beside the batch.
        ignored: Names of arguments without effect.
        takes_hidden_states: True if calls may ask for the hidden states of all layers.
    """

    name: str
    rows: InputRows
    shape: tuple[int, ...]
    takes_hidden_states = False

    def __init__(self, tower: nn.Module, tables: list[CachedTable]) -> None:
        super().__init__(tower)
        self.tables = tables
        self.function = reads_copies(tables, itself(self.forward)) if tables else None
        self.inputs: list[Any] = []
        self.ignored: list[str] = []

    def example(self, count: int, first: int = 0) -> dict[str, Any]:
        """Return the arguments of a call: so many items from the `first` on, the same each time."""
        raise NotImplementedError

    def run_items(self, count: int, asked: Mapping[str, Any] | None = None, first: int = 0) -> Any:
        """Return the tower's own output for so many items, with some arguments more."""
        return self.run(self.example(count, first) | dict(asked or {}))

    def declare(self) -> BufferSpec:
        """Return the declaration, checked.

        Raises:
            SpecError: An output has no entry for each item, or depends on other items of the batch.
            CaptureError: A run does what no graph can hold.
        """
        outputs = self._outputs({})
        self._choose(outputs)
        if isinstance(outputs, Fields) and self.takes_hidden_states and HIDDEN_STATES not in outputs.fields:
            outputs = Fields(**outputs.fields, **self._hidden_states(outputs))
        return self._spec(self.rows, outputs)

    def _spec(self, rows: InputRows, outputs: Declared) -> BufferSpec:
        layout = Batch(usual=self.shape)
        return BufferSpec(rows, layout, outputs=outputs, inputs=self.inputs, ignored=self.ignored, declared_by="recipe")

    def _choose(self, outputs: Declared) -> None:
        """Choose the function to capture: a fused one, or the tower itself; with all masks if the host decides on them.

        Raises:
            SpecError: The tower computes something else with all masks.
            CaptureError: All of them do what no graph can hold.
        """
        own, of_tower = self.function, itself(self.forward)
        if (fused := fused_or(self.tower, of_tower, FUSED)) is not None:
            self.function = fused
            if why_not(partial(self._check, outputs, {})) is None:
                return
            self.function = own
        try:
            self._check(outputs, {})
        except CaptureError:
            masked = keeps_masks(of_tower)
            self.function = reads_copies(self.tables, masked) if self.tables else masked
            try:
                self._check(outputs, {})
            except SpecError as error:
                raise SpecError(
                    "transformers leaves out its mask in calls that mask nothing, which changes the output, because "
                    "its attention is causal without one; tower.config._attn_implementation = 'eager' takes the mask "
                    "in all calls"
                ) from error

    def _outputs(self, asked: Mapping[str, Any]) -> Declared:
        """Return the declaration of the outputs of calls with these arguments.

        Raises:
            SpecError: An output has no entry for each input, or depends on other inputs of the batch.
        """
        runs = [self.run_items(count, asked) for count in (FEW, MORE)]
        declared, unknown = declare(runs, [Layout(((1, 1, 1),) * count) for count in (FEW, MORE)], ())
        if unknown:
            raise SpecError(f"its outputs {unknown} have no entry for each input of a batch")
        self._check_alone(runs[1], declared, asked)
        return declared

    def _hidden_states(self, outputs: Fields) -> dict[str, Declared]:
        """Return the declaration of the hidden states; empty if calls that ask for them have to run eager."""
        asked = {OUTPUT_HIDDEN_STATES: True}
        try:
            declared = self._outputs(asked)
            self._check(declared, asked)
        except (VarlenGraphsError, *RUN_ERRORS):
            return {}
        fields = declared.fields if isinstance(declared, Fields) else {}
        if fields.keys() != {*outputs.fields, HIDDEN_STATES}:  # only this field may come and go
            return {}
        states = fields[HIDDEN_STATES]
        layers = states if isinstance(states, Sequence) else [states]
        return {HIDDEN_STATES: Rows() if all(layer == Rows() for layer in layers) else states}

    def _check_alone(self, output: Any, declared: Declared, asked: Mapping[str, Any]) -> None:
        """Check that the last input of a batch has the same outputs alone."""
        last = MORE - 1
        parts = flatten(output, declared)
        alone = flatten(self.run_items(1, asked, last), declared)
        for whole, part, extent, path in zip(parts.tensors, alone.tensors, parts.extents, parts.paths, strict=True):
            dim = extent.rows_dim
            of_last = whole.narrow(dim, whole.shape[dim] // MORE * last, whole.shape[dim] // MORE)
            name = ".".join(map(str, path)) if path and isinstance(path[0], str) else f"output{[*path] or ''}"
            if part.shape != of_last.shape:
                raise SpecError(f"its {name} is {list(part.shape)} for one input and {list(whole.shape)} for {MORE}")
            if difference(part, of_last) is not None:
                first = ": call .eval() first" if part_in_training(self.tower) is not None else ""
                raise SpecError(
                    f"its {name} for an input depends on the other inputs of the batch, on earlier calls, or on "
                    f"chance{first}"
                )

    def _check(self, outputs: Declared, asked: Mapping[str, Any]) -> None:
        """Check the function to capture on a call with these arguments, see `Trial.check`."""
        rows = self.rows if self.rows.normalize is None else InputRows(self.name, self.rows.shape)
        call = self.example(FEW) | dict(asked)
        self.try_function(self._spec(rows, outputs), FEW, call, self.run_items(FEW, asked))

    def try_function(self, spec: BufferSpec, budget: Budget | int, call: Mapping[str, Any], own: Any) -> None:
        """Check that the function to capture gives for a call what the tower itself gave, see `Trial.check`."""
        if self.tables and self.function is not None:
            with torch.no_grad():
                self.function(self.tower, **call)  # which copies them
        self.trial(spec, self.function, budget).check(call, own)
