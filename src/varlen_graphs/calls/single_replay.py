"""Calls that a single replay answers: rows and items in the form of the graphs, in the order of the call.

Nearly all calls of most encoders are such, and take the host some three quarters of the time of others. Whatever is not
certain goes the way of all calls, which also tells what is wrong with one.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.replayed_items import DeviceItems, HostItems
from varlen_graphs.calls.results import copies
from varlen_graphs.capture.pool import on_device
from varlen_graphs.checks.values import EMPTY_ITEMS, check_not_freed, is_dense
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.reading import eager_reason, only_on_device
from varlen_graphs.declaration.signature import Signature
from varlen_graphs.declaration.static_args import StaticKey
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.options.gpu_layouts import GpuLayouts
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.routing.packing import ReplayBatch
from varlen_graphs.routing.router import Router
from varlen_graphs.stats import Stats

NOT_SINGLE = object()
"""Stands for the output of a call that takes more than one replay, or needs a closer look."""

NO_STATIC_ARGS: StaticKey = ()

LAYOUTS = (GridTHW, GridHW, Lengths)
"""Layout arguments that tell which lists are certainly valid."""


class IsDue(Protocol):
    """Tells whether a graph of these budgets is still to be compared with the module itself."""

    def __call__(self, budgets: Sequence[Budget | None], graphs: GraphSet) -> bool:
        """Return True if one is."""


class SingleReplay:
    """Answers calls by a single replay.

    Args:
        signature: Knows the arguments.
        router: Chooses the budget of a call.
        store: The graphs.
        stats: The counters.
        used: Counts replays of budgets by static arguments.
        is_due: Tells whether a graph is still to be compared; `None` if none is.
        layouts: What becomes of items on the device.
    """

    def __init__(
        self,
        signature: Signature,
        router: Router,
        store: GraphStore,
        stats: Stats,
        used: Mapping[StaticKey, Counter[Budget]],
        is_due: IsDue | None,
        layouts: GpuLayouts,
    ) -> None:
        spec = store.forward.spec
        self._signature = signature
        self._router = router
        self._store = store
        self._stats = stats
        self._used = used
        self._layouts = layouts
        self._is_due = is_due
        self._spec = spec
        self._rows, self._layout = spec.row_input.name, spec.layout.name
        self._by_position = signature.positional[:2] == [self._rows, self._layout]
        self._rows_first = signature.positional[0] == self._rows
        self._certain = not store.lazy and not signature.asks_user and _fits(spec)
        self._checked: Callable[[], GraphSet | None] = _no_graphs  # those whose outputs belong to rows and items

    def answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> Any:
        """Return the output of a call that graphs may answer as the mode is now, or `NOT_SINGLE`. Without grad.

        Args:
            args: Arguments by position.
            kwargs: Arguments by name.
            grad: True if the call came in grad mode.

        Raises:
            StaleGraphError, CaptureError: As for any call, see `GraphStore.usable`.
            LayoutError: Items on the device were wrong, if such calls wait for it.
        """
        arena = self._store.arena
        if not self._certain or arena is None or len(args) + len(kwargs) != 2:
            return NOT_SINGLE
        rows, items = self._named(args, kwargs)
        if type(rows) is not Tensor or not arena.takes(rows):
            return NOT_SINGLE
        if type(items) is Tensor and items.is_cpu and (rows.is_cuda or not self._layouts.simulated):
            items = self._listed(items, rows)
        if grad and (rows.requires_grad or self._store.mode.may_train):
            return NOT_SINGLE
        seen = self._seen(items, rows) if type(items) is list else self._only_on_device(items, rows)
        if seen is None or self._signature.bind_no_static_args() != ({}, None):
            return NOT_SINGLE
        pool = self._store.pool
        with on_device(rows.device), pool.exclusive(), pool.order:
            return self._replay(arena, rows.detach(), seen)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the rows and the items of a call of two arguments, `None` for what is not there."""
        if not args:
            return kwargs.get(self._rows), kwargs.get(self._layout)
        if len(args) == 1:
            return (args[0], kwargs.get(self._layout)) if self._rows_first else (None, None)
        return args if self._by_position else (None, None)

    def _seen(self, items: list[Any], rows: Tensor) -> Layout | None:
        """Return the items of a list, if they are certainly those of the rows, and may be replayed."""
        parsed = self._spec.layout.plain(items)
        if not parsed:
            return None
        layout = Layout(tuple(parsed))
        fits = layout.total == rows.shape[0] and layout.longest <= self._spec.largest
        return layout if fits and eager_reason(self._spec, layout) is None else None

    def _only_on_device(self, items: Any, rows: Tensor) -> Tensor | None:
        """Return the items if they are in a tensor that the host need not see."""
        if type(items) is not Tensor or not len(rows):
            return None
        unseen = only_on_device(self._spec, {self._layout: items}, rows.device, self._layouts.simulated)
        return items if unseen and len(items) else None

    def _listed(self, items: Tensor, rows: Tensor) -> Any:
        """Return a tensor of items on the CPU as a list, if it is dense, and no larger than items can be.

        Raises:
            InputError: Its memory was freed.
        """
        if not is_dense(items) or items.numel() > 3 * (rows.shape[0] + EMPTY_ITEMS):
            return items
        check_not_freed(items, self._layout)
        return items.tolist()

    def _replay(self, arena: Arena, rows: Tensor, items: Layout | Tensor) -> Any:
        """Replay the graph of a call, if there is one that is to be used as it is."""
        usable = self._store.usable(NO_STATIC_ARGS)
        graphs = usable.graphs
        if graphs is None or graphs.arena is not arena or arena.loading:
            return NOT_SINGLE
        if graphs is not self._checked():
            if not all(type(extent) in (Rows, Items) for extent in graphs.extents):  # others are functions of the items
                return NOT_SINGLE
            self._checked = weakref.ref(graphs)  # their memory goes when they are released
        replayed: HostItems | DeviceItems
        if type(items) is Layout:
            budget, replayed = self._router.whole(items, usable.costs, usable.timed), HostItems(items)
        else:
            budget = self._router.unseen(len(rows), len(items), usable.costs)
            replayed = DeviceItems({self._layout: items}, len(rows), graphs.checks)
        if budget is None or budget not in graphs or (self._is_due is not None and self._is_due((budget,), graphs)):
            return NOT_SINGLE
        pointer = arena.source.whole(rows)
        if pointer is None:
            return NOT_SINGLE
        try:
            everything = replayed.everything
            replayed.load(arena, ReplayBatch(budget, range(everything.items)), pointer)
            outputs = graphs.replay(budget)
            self._stats.count_call(everything.items)  # while the GPU works
            self._stats.count_replay(budget, everything.rows)
            self._used[NO_STATIC_ARGS][budget] += 1
            parts = []
            for extent, output in zip(graphs.extents, outputs, strict=True):
                parts.append(extent.part(output, everything))
            tensors = copies(parts, replayed.nan_masks)
            replayed.finish(self._layouts.check == "checked")
            return graphs.rebuild(tensors)
        finally:
            arena.keeps_padding = False


def _no_graphs() -> None:
    return None


def _fits(spec: BufferSpec) -> bool:
    """Return True for a declaration of packed rows, and of items that one argument describes."""
    layout, rows = spec.layout, spec.row_input
    if type(layout) not in LAYOUTS or spec.batched:  # subclasses may read items in another way
        return False
    more = layout.columns or spec.inputs or spec.host_buffers or rows.rows_dim or rows.strip
    return not more and spec.row_multiple == layout.row_multiple
