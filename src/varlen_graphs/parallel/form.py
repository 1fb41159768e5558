"""The form of outputs, which every rank learns from the smallest item of a call before it receives those of others."""

from dataclasses import replace

import torch
from torch import Tensor

from varlen_graphs.errors import CaptureError
from varlen_graphs.graphs.first_run import run_first, run_on_sample
from varlen_graphs.layout.items import Layout
from varlen_graphs.parallel.kinds import check_form
from varlen_graphs.serving.execute import Executor
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import Parts, flatten


def encode(executor: Executor, call: Call, rows: Tensor, part: Layout) -> Parts:
    """Encode some items of a call. The outputs of a batch that the call packs stay packed."""
    own = replace(call, rows=rows, layout=part, original={}, length=0)
    with torch.no_grad():
        return flatten(executor.answer(own), executor.spec.declared)


def smallest_group(layout: Layout) -> range:
    """Return the items of the group with the fewest rows."""
    return min(layout.groups, key=lambda group: sum(layout.rows[i] for i in group))


def learn_form(executor: Executor, call: Call, rows: Tensor, part: Layout) -> Parts:
    """Return the form of the output of a few items, the same on all ranks, with tensors that hold nothing.

    Raises:
        SpecError: The output has Python values that depend on the items.
        CaptureError: The module keeps something of the rows, which differ from rank to rank.
    """
    if executor.store.lazy or executor.mode.backend(rows.device) is None:  # else the capture checks it
        _check_keeps_nothing(executor, call, rows, part)
    # Two copies show Python values of the output that depend on the items, which ranks could not know.
    parts, two = encode(executor, call, rows, part), replace(part, items=part.items * 2)
    if executor.router.fits(two.items):
        check_form(encode(executor, call, torch.cat([rows, rows]), two), parts)
    return replace(parts, tensors=[tensor.to("meta") for tensor in parts.tensors])


def _check_keeps_nothing(executor: Executor, call: Call, rows: Tensor, part: Layout) -> None:
    forward, named = executor.forward, executor.mode.parts.named

    def run(rows: Tensor) -> Parts:
        return flatten(forward.exact(rows, part, call.statics), executor.spec.declared)

    def run_any(which: int) -> Parts:
        """Run the real rows first, and others only if that changed something."""
        return run(rows) if which == 1 else run_on_sample(run, rows.to(forward.row_dtype), forward, which)

    try:
        run_first(type(forward.module).__name__, named, forward.beside, run_any)
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nRanks run different items, so each would keep something else: run the module on the same real "
            "rows on every rank before, or in one process"
        ) from error
