"""The size of a call, for recordings of traffic."""

from collections.abc import Iterable

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.layouts.items import Layout
from varlen_graphs.routing.router import Router
from varlen_graphs.traffic.trace import Size, Trace


def trace_size(traces: Iterable[Trace], router: Router, spec: BufferSpec, call: Call) -> None:
    """Record the size of a call in open traces: the most that it can have, where only the GPU has seen its items.

    Items without rows do not count.
    """
    layout, squares = call.layout, 0
    if layout is not None:
        if 0 in layout.rows:
            layout = Layout(tuple([item for item in layout.items if item[0] * item[1] * item[2]]), layout.length)
        if not layout.items:
            return
        size = Size(*spec.usage.of(layout), largest=max(layout.group_rows))
        squares = spec.usage.squares(layout)
    else:  # of its largest item what is known: no less than the mean
        most, items = router.most(call), call.items
        if not 0 < items * spec.row_multiple <= most.rows:
            return  # wrong, as the GPU finds, or with items that have no rows
        size = Size(*most, largest=max(most.longest, -(-most.rows // items)))
    for trace in traces:
        trace.count(size, squares)
