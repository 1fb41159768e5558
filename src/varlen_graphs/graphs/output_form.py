"""The form of an output: shapes and dtypes of its entries, the same at every budget."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.declaration.static_args import alike
from varlen_graphs.errors import CaptureError, SpecError, counted
from varlen_graphs.outputs.parts import Parts

EntryKinds = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of one entry of each tensor."""


class OutputForm:
    """The form that the outputs of all budgets share, taken from the output at the largest one.

    Args:
        parts: That output.

    Raises:
        SpecError: There is no tensor in it, or it cannot be made again from its parts.
    """

    def __init__(self, parts: Parts) -> None:
        if not parts.tensors:
            raise SpecError("the module returned no tensor: expected at least one")
        try:
            parts.rebuild(parts.tensors)
        except TypeError as error:
            raise SpecError(f"the module's output cannot be rebuilt from its parts: {error}") from error
        self.rebuild = parts.rebuild
        self.extents = parts.extents
        self._entries = entries(parts)
        self._containers = parts.containers

    def check(self, parts: Parts) -> None:
        """Check that the output at a budget has this form."""
        check_entries(entries(parts), self._entries)
        if parts.containers != self._containers:
            names = [[kind.__name__ for kind in kinds] for kinds in (self._containers, parts.containers)]
            raise SpecError(
                f"the output is of types that depend on the budget, {names[0]} and {names[1]}: expected the same ones "
                "for all"
            )

    def check_captured(self, outputs: Sequence[Tensor]) -> None:
        """Check the outputs of a capture against the run before it; compiled code can differ."""
        found = [(own.rest(tensor.shape), tensor.dtype) for tensor, own in zip(outputs, self.extents, strict=False)]
        if len(outputs) != len(self.extents) or found != self._entries:
            raise CaptureError(
                f"the capture returned {counted(len(outputs), 'tensor')} with entries {found}, the run before it "
                f"{len(self.extents)} with {self._entries}: expected the same of every run; with compile=True leave "
                "that out"
            )


def check_constants(constants: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that the Python values of an output are the same in any call, as in a replay."""
    if not alike([*constants], [*expected]):
        raise SpecError(
            f"the output holds Python values that depend on the items, {expected} and {constants}: a graph would "
            "freeze them; leave them out, or compute them from the layout outside of the module. Of subclasses of "
            "numbers and texts it is not known whether they do"
        )


def check_entries(kinds: EntryKinds, expected: EntryKinds) -> None:
    """Check that entries have the same shape and dtype at every budget."""
    if kinds != expected:
        raise SpecError(
            f"the entries of the outputs depend on the budget: {expected} and {kinds}; expected one shape and dtype "
            "for all budgets, so return what does not grow with it, and declare what has an entry a row as Rows()"
        )


def entries(parts: Parts) -> EntryKinds:
    """Return shape and dtype of one entry of each tensor."""
    return [(own.rest(tensor.shape), tensor.dtype) for tensor, own in zip(parts.tensors, parts.extents, strict=True)]
