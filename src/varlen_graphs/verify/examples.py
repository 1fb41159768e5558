"""Example calls made of others: other rows of the same items, the same items in another order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.layout.items import Layout
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call


def permuted(call: Call, layout: Layout, groups: Sequence[range] = ()) -> tuple[list[int], Call]:
    """Return a call with its items, group by group, from the last to the first; and the former index of each item.

    If groups are given, with those alone.
    """
    rows = call.rows
    order = [item for group in reversed(groups or layout.groups) for item in group]
    items = tuple(layout.items[i] for i in order)
    if layout.length:
        rows = torch.stack([rows[i] for i in order])
    else:
        pieces = rows.split(layout.rows)
        rows = torch.cat([pieces[i] for i in order])
    return order, replace(call, rows=rows, layout=Layout(items, layout.length, layout.grouped))


def with_other_rows(arguments: Mapping[str, Any], spec: BufferSpec) -> dict[str, Any]:
    """Return the arguments of a call with other values in its rows, as likely as its own."""
    packed = spec.packed
    rows = arguments[packed.name]
    if not isinstance(rows, Tensor):
        return {**arguments}  # the call refuses them
    if rows.is_floating_point():
        first, end = packed.rows_dim, packed.rows_dim + len(spec.call_dims)
        other = rows.flip([dim for dim in range(rows.dim()) if not first <= dim < end]) / 2
    else:
        low, high = rows.long().aminmax()
        other = (low + high - rows.long()).to(rows.dtype)
    return {**arguments, packed.name: other}
