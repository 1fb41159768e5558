"""The path of a call: bound, routed, and replayed or run eager."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.exact_graphs import ExactGraphs
from varlen_graphs.calls.lazy_capture import CAPTURING
from varlen_graphs.calls.mostly_eager import MostlyEager
from varlen_graphs.calls.replayed_items import DeviceItems, HostItems
from varlen_graphs.calls.results import Collected
from varlen_graphs.calls.row_checks import check_extra_inputs, check_rows, no_rows
from varlen_graphs.calls.single_replay import NOT_SINGLE, SingleReplay
from varlen_graphs.calls.trace_size import trace_size
from varlen_graphs.capture.ambient import DIFFERENCES
from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.capture.mode import DIAGNOSED, DISABLED, HOOKS, NO_GRAPHS, OBSERVED, Mode, is_disabled
from varlen_graphs.capture.pool import on_device, others_capture
from varlen_graphs.capture.torch_modes import INSTEAD, PROXY, WATCHERS, records
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.part import part_of
from varlen_graphs.declaration.reading import check_inputs, only_on_device, read_items, read_layout
from varlen_graphs.declaration.signature import Signature
from varlen_graphs.declaration.static_args import StaticKey
from varlen_graphs.errors import CaptureError, InputError, LayoutError, SpecError
from varlen_graphs.graphs.forward import MODULE, Reference
from varlen_graphs.graphs.graph_set import CaptureInputs, GraphSet
from varlen_graphs.graphs.store import GraphStore, Usable
from varlen_graphs.inputs.extra import PerItem
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.options.gpu_layouts import GpuLayouts
from varlen_graphs.outputs.parts import flatten, with_padding
from varlen_graphs.routing.packing import ReplayBatch, total_cost
from varlen_graphs.routing.router import Route, Router
from varlen_graphs.stats import Stats
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.traffic.trace import Trace

OWN_OUTPUT = "own_output"
"""Attribute of the error of a capture: the output of the module itself, which has run the call and need not again."""

QUIET_S = 0.05
"""Seconds without a call after which the next one takes the time to capture a budget that waits for that."""


class Verification(Protocol):
    """Compares replays of calls with the module itself."""

    def is_due(self, budgets: Sequence[Budget | None], graphs: GraphSet) -> bool:
        """Return True if a graph of these budgets is still to be compared."""

    def run(self, executor: "Executor", call: Call, route: Route, graphs: GraphSet, own: Reference | None) -> Any:
        """Replay a call, and return the right output."""


class Executor:
    """Answers calls: by replays of graphs, or eager.

    Args:
        signature: Binds arguments.
        mode: Says why a call must run eager.
        router: Chooses the replay batches of a call.
        store: The graphs.
        stats: The counters.
        layouts: Options for layouts on the GPU.
        verification: Compares replays with the module itself; `None` compares none.

    Attributes:
        signature, mode, router, store, stats, layouts, verification: As given.
        forward, pool, spec: Those of the store.
        traces: Open recordings of the sizes of calls.
        used: Number of replays of each budget, or in its stead, by static arguments.
        exact: Graphs of exactly the size of calls, if there shall be some.
    """

    def __init__(
        self,
        signature: Signature,
        mode: Mode,
        router: Router,
        store: GraphStore,
        stats: Stats,
        *,
        layouts: GpuLayouts = GpuLayouts(),  # noqa: B008 - frozen
        verification: Verification | None = None,
    ) -> None:
        self.signature = signature
        self.mode = mode
        self.router = router
        self.store = store
        self.stats = stats
        self.layouts = layouts
        self.verification = verification
        self.forward = store.forward
        self.pool = store.pool
        self.spec = store.forward.spec
        self._module = type(store.forward.module).__name__
        self._mostly_eager = MostlyEager(self._module, stats, router, signature)
        self.traces: list[Trace] = []
        self.exact: ExactGraphs | None = None
        self.used: defaultdict[StaticKey, Counter[Budget]] = defaultdict(Counter)
        self._ended, self._quiet_s = -math.inf, math.inf  # of the last call, and before the present one
        is_due = None if verification is None else verification.is_due
        self._single = SingleReplay(signature, router, store, stats, self.used, is_due, layouts)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Sort the arguments of a call, and read its items where the host has to see them.

        Raises:
            InputError: An argument is missing, unknown, undeclared, or on the wrong device.
            LayoutError: Impossible items, or items that do not match the rows.
        """
        call = self.signature.bind(args, kwargs)
        check_rows(self.store, call.rows.device, call.rows.dtype)
        if call.inputs:
            check_extra_inputs(self.store, call)
        if not only_on_device(self.spec, call.description, call.rows.device, self.layouts.simulated):
            read_items(self.spec, call)
        elif call.inputs:
            check_inputs(self.spec, call)
        return call

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the module for these arguments."""
        if self.store.start_step is None:
            return self._call(args, kwargs)
        self._quiet_s = perf_counter() - self._ended  # with other threads, a capture comes sooner or later
        try:
            return self._call(args, kwargs)
        finally:
            self._ended = perf_counter()

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.begin()
        reason = self.mode.eager_reason(args, kwargs)
        if reason in WATCHERS:
            return self.watched(reason, args, kwargs)
        if reason is None and self.exact is None and not self.traces:
            grad = torch.is_grad_enabled()
            try:
                torch._C._set_grad_enabled(False)  # faster than `torch.no_grad`, and no interrupt leaves it half set
                output = self._single.answer(args, kwargs, grad)
            finally:
                torch._C._set_grad_enabled(grad)
            if output is not NOT_SINGLE:
                return output
        return self.answer(self.bind(args, kwargs), reason)

    def answer(self, call: Call, reason: str | None) -> Any:
        """Return the output of a call, which runs eager for a reason that the mode told, if there is one."""
        reason = call.eager_reason or reason or (None if self.mode.backend(call.rows.device) else NO_GRAPHS)
        if torch.is_grad_enabled() and (reason or self.mode.may_train or call.rows.requires_grad or call.inputs):
            trained = self.mode.why_trained(call.requires_grad)
            if trained is not None:
                return self.train(call, trained)
        if reason is None and self.store.lazy:
            reason = self.router.why_wait(call)
        if reason is not None:
            return self.eager(call, reason)
        grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            with on_device(call.rows.device), self.pool.exclusive(), self.pool.order:
                usable, route, own = self.route(call)
                if usable.graphs is not None and route.batches:
                    return self.run(call, route, usable.graphs, own)
        finally:
            torch._C._set_grad_enabled(grad)
        return self.eager(call, route.reason or NO_GRAPHS, own)

    def route(self, call: Call) -> tuple[Usable, Route, Reference | None]:
        """Choose the replay batches of a call, after capturing the largest budget that it needs, if calls capture.

        Before a capture the module itself runs the call: that warms it up, and is the expected output. While another
        thread captures, for any encoder, calls run eager rather than wait.
        """
        usable, own = self.store.usable(call.key), None
        if self.exact is not None and (found := self.exact.route(call, usable.graphs)) is not None:
            return usable, found, None
        meanwhile, enough = self._meanwhile(call, usable)
        rows = 0 if meanwhile is None or call.layout is None else call.layout.total
        if meanwhile is not None and usable.costs.lower_bound(rows) >= enough:  # no search for the best route
            return *meanwhile, None
        route = self.router.route(call, usable.costs, usable.timed, usable.rejected)
        captures = usable.graphs is None and (route.batches or self.store.lazy)
        if captures and (reason := self.store.why_not(self.store.key(call.key), call.static_args)) is not None:
            return usable, Route(reason=reason), None
        missing = []
        for batch in () if self.store.lazy else route.batches:  # a loop: a comprehension costs a call of its own
            if batch.budget is not None and (usable.graphs is None or batch.budget not in usable.graphs):
                missing.append(batch.budget)  # noqa: PERF401
        graphed = missing and all(batch.budget for batch in route.batches)
        if graphed and meanwhile is not None and total_cost(route.batches, usable.costs) >= enough:
            return *meanwhile, None
        if missing and others_capture() and self.store.consensus.alone:  # ranks capture together
            return usable, Route(reason=CAPTURING), None
        if missing:
            self.mode.refresh()  # submodules may have come since the last capture
            if reason := self.mode.eager_reason():
                return usable, Route(reason=reason), None
            own = None if call.staged else self._reference(call)  # the rows of a stage come later
            example = None if own is None else replace(call)
            try:
                self.store.capture(self.store.inputs(call), [max(missing)], 1, example)
            except Exception as error:
                if own is not None and own.against == MODULE:
                    setattr(error, OWN_OUTPUT, own.output)
                raise
            usable = self.store.usable(call.key, captured=True)
            route = self.router.route(call, usable.costs, usable.timed, usable.rejected)
        return usable, route, own

    def _meanwhile(self, call: Call, usable: Usable) -> tuple[tuple[Usable, Route] | None, float]:
        """Return the graphs that there are for a call, and its route, while `start_step` leaves others for later.

        And the cost of another route from which on they are to be used. `None` if there are no others, or the call is
        to capture now.
        """
        graphs, step = usable.graphs, self.store.start_step
        if step is None or not graphs or not self.store.consensus.alone:  # ranks, whose clocks differ, capture
            return None, math.inf
        if call.items == 1 and self._quiet_s >= QUIET_S:
            return None, math.inf
        captured = usable._replace(costs=graphs.usable(self.store.budgets.costs, True))
        if len(captured.costs.replays) == len(usable.costs.replays):
            return None, math.inf
        route = self.router.route(call, captured.costs, captured.timed, captured.rejected)
        if not route.batches or any(batch.budget is None for batch in route.batches):
            return None, math.inf
        return (captured, route), total_cost(route.batches, captured.costs) / step

    def _reference(self, call: Call) -> Reference | None:
        """Run the module itself on a call; return nothing where the capture, or the replay, tells what is wrong.

        Its indices are checked, because it may not take all calls that the declared forward takes.

        Raises:
            Exception: That of the module.
        """
        try:
            return run_checked(partial(self.forward.reference, replace(call)), call.rows.device)
        except (SpecError, LayoutError):
            return None
        except Exception as error:
            if (self.forward.is_module or self.forward.answers_itself(call)) and not is_out_of_memory(error):
                raise
            return None

    def run(self, call: Call, route: Route, graphs: GraphSet, own: Reference | None = None) -> Any:
        """Replay the batches of a route; compare the output with the module's own, if it is there or still to be asked.

        Returns:
            The output; the module's own if the replay is wrong, whose budgets are disabled then.
        """
        verification = self.verification
        budgets = [batch.budget for batch in route.batches]
        if verification is None or (own is None and not verification.is_due(budgets, graphs)):
            return self.replay(call, route, graphs)
        return verification.run(self, call, route, graphs, own)

    def replay(self, call: Call, route: Route, graphs: GraphSet) -> Any:
        """Replay the batches of a route.

        Raises:
            InputError: A function of the declaration made this call, while it ran for another one.
        """
        arena = graphs.arena
        if arena.loading:
            arena.raise_loading()
        try:
            arena.loading = True
            call.rows = call.rows.detach()  # an alias, because others may give the caller's tensor other memory
            arena.check_row_shape(call.shape if call.to_pack else call.rows.shape)
            packs_in_place = call.to_pack and len(route.batches) == 1 and route.batches[0].budget is not None
            if call.to_pack and not packs_in_place:
                read_layout(self.spec, call)
            padded_batch, gather_indices = (call.sizes, call.padded) if packs_in_place else (), None
            items: HostItems | DeviceItems
            if call.layout is None:
                items = DeviceItems(call.description, call.rows.shape[0], graphs.checks)
            else:
                items = HostItems(call.layout, *padded_batch)
            self.stats.count_call(items.everything.items)
            if self.traces:
                trace_size(self.traces, self.router, self.spec, call)
            collected = Collected(items.everything, views=packs_in_place)
            for batch in route.batches:
                slices, budget = items.slices(batch), batch.budget
                if budget is None:
                    outputs = self._run_eager(call, batch, slices, graphs.rejected)
                else:
                    pointer = arena.source.of(call, slices)
                    active = items.load(arena, batch, pointer)
                    gather_indices = arena.gather_indices(call) if packs_in_place else None
                    if self.spec.inputs:
                        arena.load_inputs(call, slices, budget, gather_indices)
                    if pointer is None:
                        arena.load_rows(call, slices, budget, gather_indices)
                    outputs = graphs.replay(budget)
                    fallback = graphs.exact.get(budget)
                    if fallback is None:
                        self.stats.count_replay(budget, active)  # while the GPU works
                    else:
                        self.stats.count_exact(fallback, active)
                    self.used[call.key][fallback or budget] += 1
                collected.take(outputs, graphs.extents, slices, items.nan_masks)
            items.finish(self.layouts.check == "checked")
            tensors = collected.tensors
            if call.padded and call.layout is not None:
                gather_indices = gather_indices or call.gather_indices
                tensors = with_padding(
                    tensors, graphs.extents, call.layout, call.padded, gather_indices, copies=packs_in_place
                )
            return graphs.rebuild(tensors)
        finally:
            arena.loading = arena.keeps_padding = False

    def eager(self, call: Call, reason: str, own: Reference | None = None) -> Any:
        """Return the output of a call run eager, and count it. What is not verified yet, the module itself answers.

        With the output of the module, if that has run the call.
        """
        self._count_eager(call, reason)
        if own is None or self.forward.reads_padding(call.key):
            return self.run_eager(call, reason, trusts=False)
        return self.forward.checked(call, own.output) if own.against == MODULE else own.output

    def train(self, call: Call, reason: str) -> Any:
        """Return the output of a call run eager with its gradients, and count it."""
        self._count_eager(call, reason)
        with torch.enable_grad():  # the rows of a stage are written without
            return self.forward.answer(call, grad=True)

    def watched(self, watcher: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a call that something follows beside eager PyTorch, and count it.

        The module itself answers, if it takes the call, as if there were no encoder.

        Raises:
            InputError: It does not, and the items are described by tensors whose values a tracer would keep.
        """
        if watcher == PROXY:
            raise InputError(f"the encoder of {self._module} was called with {watcher}: expected tensors; {INSTEAD}")
        call = self.signature.bind(args, kwargs)
        by_row = any(isinstance(one, PerItem) and one.per_row for one in self.spec.inputs)
        if not self.forward.answers_itself(call) or self.spec.row_input.normalize is not None or by_row:
            self.read_watched(call, watcher)
        self.stats.count_call(call.items)
        self.stats.count_eager(DIAGNOSED if OBSERVED.get() else watcher)
        return self.forward.answer(call, grad=torch.is_grad_enabled())

    def read_watched(self, call: Call, watcher: str) -> None:
        """Read the items of a call that something follows.

        Raises:
            InputError: A tracer would keep their values for all calls, or lets nothing read them.
        """
        try:
            if records(watcher) and (tensors := described_by_tensors(call.description)):
                raise InputError(
                    f"{', '.join(tensors)} would be a constant of what {watcher} records: expected the items as lists, "
                    f"where they are the same in all calls; {INSTEAD}"
                )
            read_layout(self.spec, call)
        except RuntimeError as error:
            raise InputError(
                f"the items cannot be read under {watcher} ({str(error).splitlines()[0]}): expected them as lists; "
                f"{INSTEAD}"
            ) from error

    def _count_eager(self, call: Call, reason: str) -> None:
        read_layout(self.spec, call)
        self.stats.count_call(call.items)
        if self.traces:
            trace_size(self.traces, self.router, self.spec, call)
        self.count_eager(reason, only_itself=reason == call.eager_reason)

    def count_eager(self, reason: str, only_itself: bool) -> None:
        """Count that a call, or items of one, run eager, and warn if most of the last calls did; see `MostlyEager`."""
        self.stats.count_eager(reason)
        self._mostly_eager.note(reason, only_itself)

    def run_eager(self, call: Call, reason: str | None, trusts: bool = True) -> Any:
        """Return the output of a call run eager for a reason; see `Forward.eager`."""
        changed = not trusts and reason in (DISABLED, *DIFFERENCES)
        return self.forward.eager(call, reason == HOOKS, trusts, changed)

    def check_usable(self) -> None:
        """Check that the encoder may be used here; see `Pool.check_usable`."""
        self.pool.check_usable(self._module)

    def begin(self) -> None:
        """Check that the encoder may be used; log and count layouts that the GPU has found wrong since the last call.

        Raises:
            StaleGraphError: The graphs belong to a process from which this one was forked.
            CaptureError: A module that this thread captures calls the encoder.
        """
        self.pool.check_usable(self._module)
        checks = self.store.checks
        if checks is not None and checks.calls and (found := checks.poll()):  # else there is nothing to find
            self.stats.count_wrong_layouts(found)

    def capture_inputs(self, static_args: dict[str, Any], example: Call | None = None) -> CaptureInputs | None:
        """Return the inputs to capture for calls with these static arguments, or like an example.

        `None` if nothing is captured here.

        Raises:
            SpecError: The shape of rows is not known yet.
            InputError: A static argument the module does not take.
            CaptureError: Calls with these arguments, or in this mode of the module, run eager.
        """
        if is_disabled():
            return None
        if example is None:
            rows = no_rows(self.store)
            bound, eager_reason = self.signature.bind_static_args(static_args)
        else:
            rows, bound, eager_reason = example.rows, example.static_args, example.eager_reason
        self.mode.refresh()
        with torch.no_grad():  # as a capture runs
            reason = eager_reason or self.mode.eager_reason()
        if reason is not None:
            raise CaptureError(
                f"nothing to capture: calls run eager now ({reason}); capture in the mode of construction"
            )
        if self.mode.backend(rows.device) is None:
            return None
        shape = rows.shape if example is None else example.shape
        return CaptureInputs(bound, self.spec.row_extent.rest(shape), rows.device)

    def capture(self, inputs: CaptureInputs, example: Call | None) -> None:
        """Capture all budgets for these inputs, after the module itself has run the example, if there is one.

        Without those that `start_step` leaves for later.
        """
        with torch.no_grad():
            own = None if example is None else self._reference(example)
        step = self.store.start_step
        first = None if step is None else self.store.budgets.covering(step) or None
        self.store.capture(inputs, first, call=None if own is None else example)

    def _run_eager(
        self,
        call: Call,
        batch: ReplayBatch,
        slices: Sequence[tuple[ItemSlice, ItemSlice]],
        rejected: Collection[Budget],
    ) -> list[Tensor]:
        """Run the item of a replay batch without a budget."""
        part = batch.layout(read_layout(self.spec, call))
        self.count_eager(self.router.why_missing(part, rejected), only_itself=False)
        output = self.forward.exact(replace(part_of(self.spec, call, part, slices), padded=()))
        return flatten(output, self.spec.declared).tensors


def described_by_tensors(description: Mapping[str, Any]) -> list[str]:
    """Return the names of what describes items by tensors, or by lists of them."""
    return [
        name
        for name, value in description.items()
        if isinstance(value[0] if isinstance(value, list | tuple) and value else value, Tensor)
    ]
