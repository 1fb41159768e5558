"""Calls to verify, and calls derived from them: the same items with other rows, or in another order."""

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
class VerificationCall:
    """A call to verify, its items, and the backend that captures its graphs."""

    call: Call
    layout: Layout
    backend: Backend


def permuted(example: VerificationCall) -> tuple[list[int], VerificationCall]:
    """Return the former index of each item, and the call with its groups of items in reverse order."""
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
    """Return the arguments of a call with other, equally plausible rows.

    Floating rows are halved and reversed along the dimensions of a row. Integers are mirrored between the smallest and
    the largest.
    """
    packed = spec.packed
    rows = arguments[packed.name]
    if not isinstance(rows, Tensor):
        return {**arguments}  # the call raises
    if rows.is_floating_point():
        first, end = packed.rows_dim, packed.rows_dim + len(spec.call_dims)
        other = rows.flip([dim for dim in range(rows.dim()) if not first <= dim < end]) / 2
    else:
        low, high = rows.long().aminmax()
        other = (low + high - rows.long()).to(rows.dtype)
    return {**arguments, packed.name: other}
