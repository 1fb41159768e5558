"""Calls of some items of a call."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.entries import Extent


def part_of(spec: BufferSpec, call: Call, layout: Layout, slices: Sequence[tuple[ItemSlice, ItemSlice]]) -> Call:
    """Return a call of some items of a call: views of its tensors, or one copy of each.

    Args:
        spec: The declaration.
        call: The call, whose layout was read.
        layout: The items.
        slices: Their slices in the call, and in the new one.
    """

    def take(tensor: Tensor, extent: Extent) -> Tensor:
        views = [extent.part(tensor, there._replace(length=layout.length)) for there, _ in slices]
        return torch.cat(views) if len(views) > 1 and extent.dims else views[0]

    inputs = {}
    for one, extent in spec.input_extents if call.inputs else ():
        if one.name in call.inputs:
            inputs[one.name] = take(call.inputs[one.name], extent)
    return replace(call, rows=take(call.rows, spec.row_extent), layout=layout, original={}, inputs=inputs)
