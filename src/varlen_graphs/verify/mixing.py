"""Find the operation through which rows come to depend on others."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.verify.compare import all_equal, item_slices
from varlen_graphs.verify.examples import other_values
from varlen_graphs.verify.operations import MOST_BYTES, DifferingOperation, OperationMode, Run, paths_of, where

Mixed = dict[int, list[tuple[int, Tensor, Tensor]]]
"""By operation: a result, the entries that depend both on the rows and on others, and what they are with other ones."""

Inputs = tuple[Tensor, dict[str, Tensor]]
"""Rows, and the tensors beside them by name."""

MOST_GROUPS = 8
"""Number of groups of items, the first ones, of which each is tried."""


def explain_together(forward: Forward, layout: Layout, run: Callable[[Inputs], Any], inputs: Inputs) -> str:
    """Name the first operation through which items act on each other; empty if they do not.

    Args:
        forward: The forward.
        layout: The items.
        run: Runs it.
        inputs: The rows of the items, and the tensors beside them.
    """
    spec, slices = forward.spec, item_slices(layout)
    extents = {one.name: extent for one, extent in spec.input_extents if extent.dims and one.name in inputs[1]}

    def changed(slices: Sequence[ItemSlice]) -> Inputs:
        rows, given = inputs
        beside = {name: _varied(given[name], extent, slices) for name, extent in extents.items()}
        return _varied(rows, spec.row_extent, slices), given | beside

    def entries(output: Any, slices: Sequence[ItemSlice]) -> list[Tensor]:
        parts = flatten(output, spec.declared)
        return [tensor for item_slice in slices for tensor in parts.active(item_slice)]

    for group in layout.groups[:MOST_GROUPS]:
        own = [item_slice for at, item_slice in enumerate(slices) if at in group]
        others = [item_slice for at, item_slice in enumerate(slices) if at not in group]
        base, with_others, with_own = (partial(run, some) for some in (inputs, changed(others), changed(own)))
        if found := first_mixing(forward.module, base, with_others, with_own, partial(entries, slices=own)):
            return f"The first operation through which others reach item {group[0]} is {found}"
    return ""


def _varied(tensor: Tensor, extent: Extent, slices: Sequence[ItemSlice]) -> Tensor:
    """Return a tensor with other values in the entries of some items."""
    other = other_values(tensor, range(extent.rows_dim + len(extent.dims), tensor.dim()))
    tensor = tensor.clone()
    for item_slice in slices:
        extent.part(tensor, item_slice).copy_(extent.part(other, item_slice))
    return tensor


def first_mixing(
    module: nn.Module, base: Run, others: Run, own: Run, taken: Callable[[Any], list[Tensor]]
) -> DifferingOperation | None:
    """Find the first operation through which others get into some rows of an output; `None` if they do not.

    No shape tells which entries belong to the rows: the runs do. An entry that changes both with the rows and with the
    others mixes them, which may be harmless, as scores between items are that a mask drops. What does harm shows in the
    output: it changes if such entries, of all operations up to one, are replaced by those that they are with others.
    The first of these operations is found by bisection.

    Args:
        module: The module.
        base: Runs it.
        others: The same, with other values in all that the rows must not depend on.
        own: As `base`, with other values in the rows.
        taken: Returns the entries of an output that belong to the rows.
    """
    expected = taken(base())
    if not _equal(taken(base()), expected) or _equal(taken(others()), expected):
        return None
    mixed = _mixed(base, others, own)
    if mixed is None:
        return None
    paths, operations = paths_of(module), sorted(mixed)

    def replaced(count: int) -> _EntryReplacer | None:
        """Replace the entries of so many operations; return nothing if the output stays the same."""
        replacer = _EntryReplacer(mixed, operations[:count], paths)
        return None if _equal(taken(replacer.watch(base)), expected) else replacer

    found = replaced(len(operations)) if operations else None
    none, some = 0, len(operations)
    while found is not None and some - none > 1:
        middle = (none + some) // 2
        if (nearer := replaced(middle)) is not None:
            found, some = nearer, middle
        else:
            none = middle
    return None if found is None else found.last


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return bool(all_equal(some, others))


def _mixed(base: Run, others: Run, own: Run) -> Mixed | None:
    """Return the entries that differ from those of `base` in both other runs.

    `None` if there are too many, or if the runs are not of the same operations.
    """
    mixed: Mixed = {}
    begin, room = 0, MOST_BYTES
    while True:
        one = _BitsRecorder(begin)
        one.watch(base)
        with_others, with_own = (_BitsComparer(one.results) for _ in range(2))
        with_others.watch(others)
        with_own.watch(own)
        if with_others.differs or with_own.differs:
            return None
        for at, differing in with_others.found.items():
            for place, (mask, result) in differing.items():
                both = mask & with_own.found.get(at, {}).get(place, (~mask, result))[0]
                if both.any():
                    mixed.setdefault(at, []).append((place, both, values := result[both]))
                    room -= both.nbytes + values.nbytes
        if one.end is None or room < 0:
            return None if room < 0 else mixed
        begin = one.end


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of integers, which all dtypes can be compared and written as."""
    if tensor.is_complex():
        return _bits(torch.view_as_real(tensor.resolve_conj()))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize])


class _BitsRecorder(OperationMode):
    """Records results from the operation `begin` on, up to half of `MOST_BYTES`; `end` is the next one, if any."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.results: dict[int, tuple[str, list[Tensor]]] = {}
        self.end: int | None = None
        self._begin = begin
        self._room = MOST_BYTES // 2

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        if at < self._begin or self.end is not None:
            return
        if self._room < 0:
            self.end = at
            return
        self.results[at] = name, [_bits(result).clone() for result in results]
        self._room -= sum(result.nbytes for result in results)


class _BitsComparer(OperationMode):
    """Compares results with recorded ones: masks of entries that differ, and the results, by operation and place."""

    def __init__(self, recorded: Mapping[int, tuple[str, list[Tensor]]]) -> None:
        super().__init__()
        self.differs = False  # True if another operation came
        self.found: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._recorded = recorded

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        if at not in self._recorded:
            return
        expected, recorded = self._recorded[at]
        came = [_bits(result) for result in results]
        if name != expected or [one.shape for one in came] != [one.shape for one in recorded]:
            self.differs = True
            return
        for place, (one, other) in enumerate(zip(came, recorded, strict=True)):
            if (mask := one != other).any():
                self.found.setdefault(at, {})[place] = mask, one.clone()


class _EntryReplacer(OperationMode):
    """Replaces entries of the results of some operations; `last` is the last of these."""

    def __init__(self, mixed: Mixed, operations: Sequence[int], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.last: DifferingOperation | None = None
        self._mixed = mixed
        self._operations = frozenset(operations)
        self._end = operations[-1]
        self._paths = paths

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        for place, mask, values in self._mixed[at] if at in self._operations else ():
            _bits(results[place])[mask] = values
        if at == self._end:
            self.last = DifferingOperation(name, *where(self._paths))
