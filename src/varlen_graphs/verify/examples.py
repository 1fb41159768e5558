"""Example calls made of others: other rows of the same items, the same items in another order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.part import part_of
from varlen_graphs.layouts.item_slice import slices_of
from varlen_graphs.layouts.items import Layout


def permuted(spec: BufferSpec, call: Call, layout: Layout, groups: Sequence[range] = ()) -> tuple[list[int], Call]:
    """Return a call with its items, group by group, from the last to the first; and the former index of each item.

    If groups are given, with those alone, padded to the longest of them.
    """
    order = [item for group in reversed(groups or layout.groups) for item in group]
    kept = layout.of([layout.items[i] for i in order])
    if groups and layout.length:
        kept = replace(kept, length=kept.longest)
    return order, part_of(spec, call, kept, slices_of(layout, order, kept.length))


def with_other_rows(arguments: Mapping[str, Any], spec: BufferSpec) -> dict[str, Any]:
    """Return the arguments of a call with other values in its rows, as likely as its own."""
    packed = spec.row_input
    rows = arguments[packed.name]
    if not isinstance(rows, Tensor):
        return {**arguments}  # the call refuses them
    dims = spec.rows_form.row_dims(rows.dim()) if rows.is_floating_point() else []
    return {**arguments, packed.name: other_values(rows, dims)}


def other_values(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Return other values, as likely as those of a tensor: floating ones are flipped along `dims` and halved."""
    if tensor.is_floating_point():
        return tensor.flip(list(dims)) / 2
    low, high = tensor.long().aminmax()
    return (low + high - tensor.long()).to(tensor.dtype)
