"""Calls to verify with, and calls made of them: other rows of the same items, the same items in another order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.backend import Backend
from varlen_graphs.layout.items import Layout
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call


@dataclass(frozen=True)
class Example:
    """A call to verify with.

    Attributes:
        call: The call.
        layout: Its items.
        backend: What captures graphs for it.
    """

    call: Call
    layout: Layout
    backend: Backend


def permuted(example: Example) -> tuple[list[int], Example]:
    """A call with its items, group by group, from the last to the first; and which item each of them was."""
    rows, layout = example.call.rows, example.layout
    order = [item for group in reversed(layout.groups) for item in group]
    items = tuple(layout.items[i] for i in order)
    if layout.length:
        rows = torch.stack([rows[i] for i in order])
    else:
        pieces = rows.split(layout.rows)
        rows = torch.cat([pieces[i] for i in order])
    call = replace(example.call, rows=rows)
    return order, replace(example, call=call, layout=Layout(items, layout.length, layout.grouped))


def with_other_rows(arguments: Mapping[str, Any], spec: BufferSpec) -> dict[str, Any]:
    """The arguments of a call with rows of other values, which are as likely as its own.

    Floating rows: halves, each entry of a row from its other end. Integers: between the smallest and the largest.
    """
    packed = spec.packed
    rows = arguments[packed.name]
    if not isinstance(rows, Tensor):
        return {**arguments}  # for the call to refuse
    if rows.is_floating_point():
        first, end = packed.rows_dim, packed.rows_dim + len(spec.call_dims)
        other = rows.flip([dim for dim in range(rows.dim()) if not first <= dim < end]) / 2
    else:
        low, high = rows.long().aminmax()
        other = (low + high - rows.long()).to(rows.dtype)
    return {**arguments, packed.name: other}
