"""Read the items of a call on the host."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.checks.values import check_numbers, is_integers
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import EMPTY_ITEM, Call
from varlen_graphs.errors import LayoutError, counted
from varlen_graphs.inputs.extra import PerRow
from varlen_graphs.layouts.arguments import check_batch
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.mask import Mask, check_marks
from varlen_graphs.layouts.packed_batch import GatherIndices, item_sizes, pack_rows


def read_items(spec: BufferSpec, call: Call) -> Layout:
    """Return the items of a call, and keep them in `call.layout`. Costs a sync if only the GPU has seen them.

    A padded batch to pack stays padded, with `call.to_pack`; `call.eager_reason` tells if only the module can run the
    items.

    Raises:
        LayoutError: Impossible items, items that do not match the rows or other tensors of the call, or an item that an
            output ratio cuts.
    """
    if call.layout is None:
        batch = spec.rows_form.batch(call.rows) if spec.packs else call.rows
        call.layout = parse(spec, call.description, batch.shape)
        if call.inputs:
            check_inputs(spec, call)
        if spec.packs:
            call.rows, call.padded = batch, tuple(batch.shape[1 : 1 + spec.rows_form.padded_dims])
            call.sizes = item_sizes(call.layout, len(call.padded))
            call.gather_indices, call.to_pack = GatherIndices(batch.device), True
        if call.eager_reason is None:
            call.eager_reason = eager_reason(spec, call.layout, call.padded)
    return call.layout


def eager_reason(spec: BufferSpec, layout: Layout, padded: tuple[int, ...] = ()) -> str | None:
    """Return the reason why no graph takes such items, whatever budgets hold; `None` if graphs do."""
    if 0 in layout.rows:
        return EMPTY_ITEM
    if spec.min_rows > 1 and (least := min(layout.rows)) < spec.min_rows:
        return f"an item of {counted(least, 'row')}, with min_rows={spec.min_rows}"
    return spec.layout.eager_reason(layout, padded)


def read_layout(spec: BufferSpec, call: Call) -> Layout:
    """Return the items of a call as `read_items` does, and pack a padded batch.

    Raises:
        LayoutError: As for `read_items`.
    """
    layout = read_items(spec, call)
    if call.to_pack:
        call.rows = pack_rows(call.rows, call.sizes, call.gather_indices)
        names = [one.name for one in spec.inputs if isinstance(one, PerRow) and one.name in call.inputs]
        packed = {name: pack_rows(call.inputs[name], call.sizes, call.gather_indices) for name in names}
        call.inputs = call.inputs | packed
        call.to_pack = False
    return layout


def check_inputs(spec: BufferSpec, call: Call) -> None:
    """Check that the tensors beside the rows have as many entries as the call has rows or items.

    Raises:
        LayoutError: One has another number.
    """
    rows, extent = call.rows.shape, spec.call_extent
    if call.staged and call.layout is not None:  # the rows come later
        rows = torch.Size(extent.size(ItemSlice.of(call.layout)))
    item_slice = ItemSlice(0, rows[0], 0, call.items, rows[1] if spec.batched else 0)
    for one in spec.inputs:
        if one.name in call.inputs:
            own = one.extent(extent)
            sizes, came = own.size(item_slice), call.inputs[one.name].shape[: len(own.dims)]
            if came != sizes:
                what = " by ".join(f"{size} {name}" for size, name in zip(sizes, own.dims, strict=True))
                raise LayoutError(
                    f"{one.name} has {list(came)} entries, but the call has {what}: expected an entry for each, as "
                    f"{type(one).__name__} declares"
                )


def only_on_device(spec: BufferSpec, description: Mapping[str, Any], device: torch.device, simulated: bool) -> bool:
    """Return True if the device alone needs to see the items, which are described by tensors there.

    The host reads what lies on the CPU, unless that is `simulated` to be a device.
    """
    if spec.needs_layout or (device.type == "cpu" and not simulated):
        return False
    table = description[spec.layout.name]
    if not isinstance(table, Tensor) or not spec.layout.is_table(table) or table.device != device:
        return False
    for column in spec.layout.columns:
        values = description[column.name]
        if not is_integers(values, 1) or len(values) != len(table) or values.device != device:
            return False
    return True


def parse(spec: BufferSpec, description: Mapping[str, Any], shape: Sequence[int]) -> Layout:
    """Return the items, checked against the shape of the rows.

    Args:
        spec: The declaration.
        description: The layout argument and the columns, by name.
        shape: Shape of the rows, `[rows, ...]`, or of a batch `[batch, *padded, ...]`; empty if there are none yet.

    Raises:
        LayoutError: Impossible items, items that do not match the rows, or an item that an output ratio cuts.
    """
    argument = spec.layout
    if shape:
        check_description(description, math.prod(shape[: 1 + spec.rows_form.padded_dims]))
    value = description[argument.name]
    sizes = argument.parse(value)
    layout = Layout(tuple(sizes), argument.batch_length(value, sizes, shape))
    if shape:  # before any function of the user's sees the items
        if spec.row_input.padded_by is None:
            argument.check_rows(layout, shape, spec.row_input.name)
        else:
            _check_batch_to_pack(spec, layout, description, shape)
    if argument.columns:
        layout = _with_columns(spec, layout, description)
    if spec.row_multiple != argument.row_multiple:  # otherwise the layout argument has checked it
        _check_ratios(spec, layout)
    if layout.longest > spec.largest:  # no item is larger than its rows
        _check_sizes(spec, layout)
    return layout


def check_description(description: Mapping[str, Any], rows: int) -> None:
    """Check that no description is longer than so many rows can need.

    Raises:
        LayoutError: One is.
    """
    for name, value in description.items():
        check_numbers(name, value, rows)


def _with_columns(spec: BufferSpec, layout: Layout, description: Mapping[str, Any]) -> Layout:
    items = list(layout.items)
    for column in spec.layout.columns:
        given = description[column.name] if column.function is None else column.function(layout)
        values = column.parse(given, len(items))
        items = [(*item, value) for item, value in zip(items, values, strict=True)]
        if column.groups:
            begins = column.begins(given, len(items))
    if spec.layout.grouped:
        items = [(*item, begin) for item, begin in zip(items, begins, strict=True)]
    return spec.layout.layout(items, layout.length)


def _check_batch_to_pack(
    spec: BufferSpec, layout: Layout, description: Mapping[str, Any], shape: Sequence[int]
) -> None:
    name, mask = spec.layout.name, str(spec.row_input.padded_by)
    check_batch(name, layout, shape, spec.row_input.name)
    check_marks(Mask(mask), description[mask], name, layout, shape)


def _check_sizes(spec: BufferSpec, layout: Layout) -> None:
    declared = ", or declare the buffer with a larger largest="
    for buffer, largest in spec.limited:
        for index, item in enumerate(layout.items):
            if buffer.size(item) > largest:
                raise LayoutError(
                    f"{spec.layout.name}[{index}] has a size of {buffer.size(item)}, but buffer {buffer.name!r} has "
                    f"entries up to {largest}: resize the input{spec.advice(declared, '')}"
                )


def _check_ratios(spec: BufferSpec, layout: Layout) -> None:
    multiple = spec.row_multiple
    declared = ", or declare Entries(...) with a function of the rows" if spec.layout.padded else ""
    instead = spec.advice(declared, "")
    for index, count in enumerate(layout.rows):
        if count % multiple:
            raise LayoutError(
                f"{spec.layout.name}[{index}] has {counted(count, 'row')}: expected a multiple of {multiple}, because "
                f"the outputs are declared with that ratio; pad the item{instead}"
            )
    if layout.length % multiple:
        raise LayoutError(
            f"{spec.row_input.name} is padded to {counted(layout.length, 'row')}: expected a multiple of {multiple}, "
            f"because the outputs are declared with that ratio; pad the batch{instead}"
        )


def exact_table(spec: BufferSpec, layout: Layout, device: torch.device) -> ItemTable:
    """Return the table of items that run without padding."""
    values = torch.tensor(layout.items, dtype=torch.int64, device=device)
    return spec.item_table(values, spec.exact_budget(layout))
