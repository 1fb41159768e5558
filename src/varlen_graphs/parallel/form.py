"""The form of outputs, which every rank learns from the smallest item of a call before it receives those of others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.calls.execute import Executor
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.part import part_of
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import CaptureError
from varlen_graphs.graphs.cached_state import StateCheck, runs_of
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import Parts, flatten
from varlen_graphs.parallel.kinds import check_form
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.routing.packing import ReplayBatch


def encode(executor: Executor, part: Call) -> Parts:
    """Encode some items of a call. The outputs of a batch that the call packs stay packed."""
    with torch.no_grad():
        reason = executor.mode.eager_reason((part.rows, *part.inputs.values()))
        output = executor.answer(replace(part, padded=()), reason)
    return flatten(output, executor.spec.declared)


def smallest_part(spec: BufferSpec, call: Call) -> Call:
    """Return a call of the item, or group, with the fewest rows."""
    layout = read_layout(spec, call)
    few = ReplayBatch(None, min(layout.groups, key=lambda group: sum(layout.rows[i] for i in group)))
    return part_of(spec, call, few.layout(layout), few.slices(layout))


def smallest_of_all(ranks: Ranks, spec: BufferSpec, call: Call, layouts: Sequence[Layout]) -> Call:
    """Return a call of the smallest item, or group, that any rank has, sent by that rank."""
    sizes = {rank: min(own.group_rows) for rank, own in enumerate(layouts) if own.items}
    owner = min(sizes, key=lambda rank: sizes[rank])
    device = call.rows.device

    def send() -> tuple[None, tuple[Layout | None, Tensor, dict[str, Tensor]] | None]:
        if owner != ranks.own:
            return None, None
        few = smallest_part(spec, call)
        return None, (few.layout, few.rows.cpu(), {name: tensor.cpu() for name, tensor in few.inputs.items()})

    sent: list[Any]
    _, sent = ranks.exchange(device, send)
    layout, rows, inputs = sent[owner]
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    return replace(call, rows=rows.to(device), inputs=inputs, layout=layout, original={})


def learn_form(executor: Executor, few: Call) -> Parts:
    """Return the form of the output of a few items, the same on all ranks, with tensors that hold nothing.

    Raises:
        SpecError: The output has Python values that depend on the items.
        CaptureError: The module keeps something of the rows, which differ from rank to rank.
    """
    _check_keeps_nothing(executor, few)
    # Two copies show Python values of the output that depend on the items, which ranks could not know.
    layout, parts = read_layout(executor.spec, few), encode(executor, few)
    two, item_slice = replace(layout, items=layout.items * 2), ItemSlice.of(layout)
    if executor.router.fits(two.items):
        check_form(encode(executor, part_of(executor.spec, few, two, [(item_slice, item_slice)] * 2)), parts)
    return replace(parts, tensors=[tensor.to("meta") for tensor in parts.tensors])


def _check_keeps_nothing(executor: Executor, few: Call) -> None:
    runs = runs_of(replace(few, padded=()))
    check = StateCheck(executor.forward, runs, runs)
    try:
        check.begin(None, is_first=False)
        if (mismatch := check.find_mismatch()) is not None:
            raise CaptureError(mismatch)
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nRanks run different items, so each would keep something else: run the module on the same real "
            "rows on every rank before, or in one process"
        ) from error
