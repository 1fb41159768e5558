"""All graphs of an encoder, their static memory, and what they depend on."""

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.consensus import Consensus
from varlen_graphs.capture.memory import empty_cache, is_out_of_memory
from varlen_graphs.capture.mode import Mode
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.static_args import StaticKey, static_key
from varlen_graphs.errors import BudgetError, CaptureError, InputError, SpecError, StaleGraphError, counted, warn
from varlen_graphs.graphs.allowance import Allowance
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.cached_state import StateCheck
from varlen_graphs.graphs.calibrate import ReplayTimes, measure
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.gpu_checks import GpuChecks
from varlen_graphs.graphs.graph_capture import GraphCapture, reason_of
from varlen_graphs.graphs.graph_set import CaptureInputs, GraphSet
from varlen_graphs.guards.module_guard import ModuleGuard
from varlen_graphs.guards.slots import Change
from varlen_graphs.options.capture import Capture
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import CAPTURE_FAILED, UNSETTLED, EnabledBudgets
from varlen_graphs.routing.eviction import MemoryLimit
from varlen_graphs.torch_dispatch.sharded import mesh_of

LOGGER = logging.getLogger("varlen_graphs")

PARTS = {
    "captured": "captured in", "compiled": "torch.compile took of that", "verified": "verified in",
    "timed": "budgets timed in",
}  # fmt: skip
"""Parts of captures, as metrics name them and as reports do."""

MANY_KEYS = 8
"""Number of sets of static arguments at which a warning tells their price."""

MOST_SETS = 16
"""Number of sets of static arguments and adapters that calls capture; `encoder.capture(...)` captures any."""

MOST_RELEASES = 3
"""Number of times that graphs are captured anew because the module itself has changed what it keeps."""

PER_CALL = "declare what changes from call to call by inputs=[vg.inputs.PerCall(...)] of the BufferSpec"

TOO_MANY_SETS = "more sets of static arguments than calls capture"

Key = tuple[StaticKey, Hashable]
"""Key of a set of graphs: static arguments, and the active adapters."""

CheckGraphs = Callable[[GraphSet, Sequence[Budget], Forward, StateCheck | None, Call | None], None]
"""Compares new graphs of these budgets with eager runs on a shadow, on rows of a call, and refuses wrong ones."""


class Usable(NamedTuple):
    """Graphs that a call may use.

    Attributes:
        graphs: Its set of graphs; `None` before the first capture.
        costs: The budgets that the call may use, and their costs.
        timed: True if costs were measured for calls like this one.
        rejected: Budgets whose graphs failed verification, which the call must not use.
    """

    graphs: GraphSet | None
    costs: Costs
    timed: bool
    rejected: Collection[Budget] = ()


class GraphStore:
    """The graphs of each set of static arguments and adapters, over one arena. Changed in the pool's turn only.

    Args:
        forward: The forward to capture.
        mode: The mode to capture in.
        pool: The pool to capture into.
        budgets: The budgets. It learns costs, and disables budgets that cannot be captured.
        limit: A limit on memory; `None` is any amount.
        options: `lazy`, `on_change` and `start_step` of the encoder.

    Attributes:
        forward, mode, pool, budgets, limit: As given.
        arenas: Static inputs of graphs by the shape of a row: one, unless items of a batch have several.
        checks: Validates layouts on the GPU; kept when graphs are dropped.
        guard: Compares memory and Python state with the last capture; `None` before the first.
        consensus: Consensus with other ranks that capture the module.
        check_graphs: Checks new graphs; `None` trusts them.
        seconds: Duration of each part of the first captures.
        failure: Reason why the last capture gave no graph at all, if it did not.
        staged: True while a caller writes rows into the arena; only its own thread can interfere then.
        losses: Number of times that all graphs were dropped.
        lazy: True if calls never capture.
        start_step: Ratio of rows up to which budgets wait for calls to be captured; `None` if none does.
    """

    def __init__(
        self,
        forward: Forward,
        mode: Mode,
        pool: Pool,
        budgets: EnabledBudgets,
        limit: MemoryLimit | None,
        options: Capture,
    ) -> None:
        self.forward = forward
        self.mode = mode
        self.pool = pool
        self.budgets = budgets
        self.limit = limit
        self.arenas: dict[tuple[int, ...], Arena] = {}
        self.checks: GpuChecks | None = None
        self.guard: ModuleGuard | None = None
        self.consensus = Consensus()
        self.check_graphs: CheckGraphs | None = None
        self.seconds: dict[str, float] = {}
        self.failure: str | None = None
        self.staged = False
        self.losses = 0
        self._releases = 0
        self.lazy, self._recapture = options.lazy, options.on_change == "recapture"
        self.start_step = options.start_step
        self._sets: dict[Key, GraphSet] = {}
        self._allowance: Allowance | None = None
        self._reported: set[str] = set()
        self._warned_of_sets = False

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    @property
    def arena(self) -> Arena | None:
        """Static inputs of graphs, those of the first row shape; `None` before the first capture."""
        return next(iter(self.arenas.values()), None)

    @property
    def sets(self) -> list[GraphSet]:
        """The set of graphs of each key."""
        return [*self._sets.values()]

    def find(self, static_args: StaticKey) -> GraphSet | None:
        """Return the graphs for these static arguments, if there are any. Needs no turn of the pool."""
        return self._sets.get(self.key(static_args))

    @property
    def exact(self) -> list[tuple[Key, Budget]]:
        """The sizes that have graphs of exactly them, with their keys."""
        return [(key, size) for key, graphs in self._sets.items() for size in graphs.exact]

    def key(self, static_args: StaticKey) -> Key:
        """Return the key of the graphs for these static arguments."""
        return static_args, self.mode.adapters()

    def usable(self, static_args: StaticKey, captured: bool = False) -> Usable:
        """Return the graphs that a call with these static arguments may use.

        Args:
            static_args: The static arguments.
            captured: If True, with the budgets alone that have a graph; so it is always if calls never capture.

        Raises:
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`. Each call checks a part. For
                another change of what the module holds, or of a forward, graphs are released instead.
            CaptureError: Captures have changed what the module keeps outside of itself.
        """
        if self.staged:
            self.check_not_staged()
        if (why := self.forward.verdict.changed_outside) is not None:
            raise CaptureError(f"{why}; encoder.release() tries again, once the module is as it should be")
        key = static_args, self.mode.adapters()
        if self.forward.changed:
            self._handle_own_changes()
        if self.guard is not None and (change := self.guard.find_change_sampled()):
            self._follow(change)
        graphs, costs = self._sets.get(key), self.budgets.costs
        if graphs is None:
            return Usable(None, costs.without(costs.replays) if self.lazy else costs, False)
        return Usable(graphs, graphs.usable(costs, captured or self.lazy), graphs.timed, graphs.rejected)

    def _handle_own_changes(self) -> None:
        """Release all graphs if the module itself has changed what it keeps, in a way that no run for a set had shown.

        A few times; then calls stay eager.
        """
        changed = set(self.forward.changed)
        self.forward.changed.difference_update(changed)  # others may come meanwhile
        found = next(filter(None, [graphs.compare_again(changed) for graphs in self.sets]), None)
        if found is None:
            return
        self._release_for(f"{found!r} changed in a run of the module itself")

    def _follow(self, change: Change) -> None:
        """Release all graphs for a change that a call has found, or raise."""
        if change.of_attribute and not self._recapture:
            self._release_for(f"{change.what} (if the forward does not read it, begin its name with an underscore)")
        else:
            self._handle(change)

    def _release_for(self, change: str) -> None:
        """Release all graphs, a few times; then calls stay eager."""
        LOGGER.warning("%s: graphs are released, and recaptured", change)
        self.release()
        self._releases += 1
        if self._releases > MOST_RELEASES:
            for budget in self.budgets.enabled:
                self.budgets.disable(budget, UNSETTLED, f"again and again, {change}")

    def inputs(self, call: Call) -> CaptureInputs:
        """Return the inputs to capture graphs for a call."""
        return CaptureInputs(call.static_args, self.forward.spec.row_extent.rest(call.shape), call.rows.device)

    def can_capture(self, key: Key, inputs: CaptureInputs) -> bool:
        """Return True if a capture now would be in the mode of construction, with the adapters of this key."""
        self.mode.refresh()
        with self.mode.autocast(inputs.device.type):  # another thread may have another one
            return self.mode.eager_reason() is None and self.key(key[0]) == key

    def inputs_now(self) -> list[CaptureInputs]:
        """Return the inputs of the sets that a capture now would complete."""
        return [graphs.inputs for key, graphs in [*self._sets.items()] if self.can_capture(key, graphs.inputs)]

    def capture(
        self,
        inputs: CaptureInputs,
        requested: Collection[Budget] | None = None,
        calls: float = 0.0,
        call: Call | None = None,
    ) -> None:
        """Capture all enabled budgets without a graph, or those that so many recent calls requested.

        With the call that needs them now, which the module has answered once.

        The first graph of a set is that of the largest enabled budget: the pool is then as large as it has to be, and
        smaller ones find room in it. Where all items are alike, budgets are few, and those alone are captured that
        calls request. If none of these can be captured, smaller ones are tried. Synchronizes with the host.

        Raises:
            InputError: This thread stages rows, or computes a host buffer for a call.
            CaptureError: No budget is enabled, or none could be captured.
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`.
        """
        self.check_free()
        key = self.key(self.forward.spec.key(inputs.static_args, inputs.row_shape))
        self._handle_own_changes()
        if self.guard is not None and (change := self.guard.find_change()):
            self._follow(change)
        graphs, enabled = self._sets.get(key), self.budgets.enabled
        if not enabled and requested is not None:
            return  # the module changes again and again: the calls that requested graphs stay eager
        if graphs is None and not enabled:
            raise CaptureError(
                f"nothing to capture: {self.budgets.describe()}; encoder.release() enables all budgets again"
            )
        missing = [budget for budget in enabled if graphs is None or graphs.lacks(budget)]
        alike = self.forward.spec.layout.one_row
        first = missing[-1:] if not (graphs or alike) else []  # none yet, or all of them were dropped
        wanted = missing if requested is None else [b for b in missing if b in requested or b in first]
        if wanted:
            spare = [one for one in missing if one < max(wanted) and one not in wanted] if first or alike else []
            self._capture(key, inputs, wanted, spare, call)
            if self.limit is not None:
                self.limit.request(requested or (), calls)
            self._keep_to_limit()

    def capture_exact(self, key: Key, size: Budget, fallback: Budget) -> None:
        """Capture a graph for calls of exactly this size, beside those of the budgets; see `capture`.

        It is neither timed nor disabled.

        Args:
            key: A key that has graphs.
            size: The size.
            fallback: The budget that such calls use without it.
        """
        self._capture(key, self._sets[key].inputs, [size], fallback=fallback)

    def drop_exact(self, key: Key, size: Budget) -> None:
        """Drop the graph of an exact size, once it has run."""
        self.pool.synchronize()
        self._sets[key].drop(size)

    def _capture(
        self,
        key: Key,
        inputs: CaptureInputs,
        budgets: Sequence[Budget],
        spare: Sequence[Budget] = (),
        call: Call | None = None,
        fallback: Budget | None = None,
    ) -> None:
        """Capture these budgets, which have no graph yet, guard what they read, check and time them."""
        backend = self.mode.backend(inputs.device)
        assert backend is not None  # noqa: S101 - calls run eager without one
        self._check_ranks()
        self.mode.warn_of_training()
        name, graphs = type(self.forward.module).__name__, self._sets.get(key)
        is_first, is_new, start = not self._sets, graphs is None, time.perf_counter()
        with self.pool.capturing(name), torch.inference_mode(False), torch.no_grad(), on_device(inputs.device):
            if graphs is None:
                graphs = self._new_set(inputs, timed=is_first)
            self._allowance = self._allowance or Allowance(inputs.device, self.forward.spec.layout.one_row)
            times = ReplayTimes(graphs, self.forward.spec)
            # With what a function on the host makes of such items, nothing runs ahead of the check.
            later = fallback or self.budgets.known or self.forward.spec.host_buffers
            at_once = graphs.timed and inputs.device.type == "cuda" and not later
            capture = GraphCapture(
                graphs, self.forward, self.mode, backend, call, fallback, self.budgets.defaults, self._allowance,
                times if at_once else None,
            )  # fmt: skip
            try:
                tried = capture.run(budgets, spare)
            except Exception as error:
                self.failure = reason_of(error) if is_first else self.failure
                raise
            self.failure = None
            self._sets[key] = graphs
            if graphs.arena not in self.arenas.values():
                self.arenas = {**self.arenas, inputs.row_shape: graphs.arena}  # another thread may be reading them
            captured = [budget for budget in tried if budget in graphs]
            failed = {} if fallback else {one: graphs.failed[one] for one in tried if one in graphs.failed}
            with graphs.dropped_on_error(tried):
                if is_first:
                    self.mode.hold_settings()
                self._guard()
                for budget, reason in failed.items():
                    self.budgets.disable(budget, CAPTURE_FAILED, reason)
                self.budgets.leave_out(capture.left_out)
                if graphs.timed and not fallback:
                    self.seconds = {} if is_first else self.seconds
                    self._count_seconds("captured", start)
                    if is_first and capture.compile_seconds is not None:
                        self.seconds["compiled"] = capture.compile_seconds
                if self.check_graphs is not None:
                    start = time.perf_counter()
                    self.check_graphs(graphs, captured, capture.eager, capture.check, call)
                    self._count_seconds("verified", start)
                    graphs.moving |= capture.shadow.places()
            if graphs.timed and not fallback:
                self._time(graphs, [one for one in captured if one in graphs], capture.eager, is_first, times)
        rows = sorted(budget.rows for budget in captured if budget in graphs)
        if is_new and rows:
            made = f"{name} has {counted(len(rows), 'graph')} of {rows[0]} to {rows[-1]} rows"
            LOGGER.info("%s", "; ".join([made, *(self.took(1) if graphs.timed else ())]))
        for budget, reason in failed.items():  # last, because a warning may be an error
            warn(
                f"the graph of {budget.rows} rows could not be captured, and the budget is disabled: other budgets "
                f"take its calls, and what none of them holds runs eager; {reason}"
            )
        if is_new and len(self._sets) == MANY_KEYS:
            advice = self.forward.spec.advice(PER_CALL, "pass the same values, or round them to a few")
            warn(
                f"{len(self._sets)} sets of static arguments were captured, the last with {inputs.static_args}: each "
                f"takes time and memory; {advice}"
            )

    def _new_set(self, inputs: CaptureInputs, timed: bool) -> GraphSet:
        spec = self.forward.spec
        if self.checks is None or self.checks.device != inputs.device:
            self.checks = GpuChecks(spec, inputs.device)
        # All rows but those of a batch fit the first arena.
        arena = self.arenas.get(inputs.row_shape) if spec.layout.one_row else self.arena
        return GraphSet(inputs, arena or self._new_arena(inputs), self.checks, self.consensus, timed)

    def _new_arena(self, inputs: CaptureInputs) -> Arena:
        forward, (_, row_shape, device) = self.forward, inputs
        dtypes = [forward.input_dtype(one) for one in forward.spec.inputs]
        try:
            arena = Arena(forward.spec, self.budgets.enabled, row_shape, forward.row_dtype, device, dtypes)
        except (RuntimeError, MemoryError) as error:
            if device.type == "cuda" or not is_out_of_memory(error):
                raise
            largest = max(self.budgets.enabled)
            raise BudgetError(
                f"no memory for the inputs of the largest budget, {largest} ({reason_of(error)}): expected budgets "
                "for which there is memory; take the largest call that comes as the largest one"
            ) from error
        # Torch reuses pinned memory at once that it has not copied from itself, also after a capture that failed.
        weakref.finalize(arena, self.pool.synchronize).atexit = False
        return arena

    def _guard(self) -> None:
        """Watch all that graphs depend on; warn of what cannot be watched, and of what replays overwrite."""
        forward, first, own = self.forward, self.sets[0], set().union(*(graphs.own for graphs in self.sets))
        read = [tensor for graphs in self.sets for tensor in graphs.read.values()]
        if forward.compiled is not None:  # what compiled code reads is not seen
            read += forward.module.buffers()
        if self.guard is None or not self.guard.covers(read, own):
            self.guard = ModuleGuard(forward.module, forward.beside, read, own, first.snapshot, first.moving)
        unowned, kept = self.guard.unowned, self.kept_outside
        if not self._reported.issuperset(unowned):
            warn(
                f"graphs read {counted(len(unowned), 'tensor')} that neither the module nor a part of it holds: "
                f"{'; '.join(unowned)}; they are held, but if they are replaced later, graphs go on reading what is "
                "held, and nothing reports it; register them, or the modules they belong to, as parts of the module"
            )
        if not self._reported.issuperset(kept):
            warn(
                f"something outside of the module keeps {counted(len(kept), 'tensor')} made while graphs were "
                f"captured: {'; '.join(kept)}; replays overwrite this memory, and no graph can use it for "
                "anything else; return what is needed as an output, and drop the rest"
            )
        self._reported = {*unowned, *kept}

    @property
    def kept_outside(self) -> list[str]:
        """Descriptions of tensors that were made during captures and are still referenced."""
        return [kept for graphs in self.sets for kept in graphs.kept_outside]

    def _time(
        self,
        graphs: GraphSet,
        budgets: Sequence[Budget],
        forward: Forward,
        is_first: bool,
        times: ReplayTimes,
    ) -> None:
        """Time budgets whose costs are not known from an earlier run."""
        before = self.budgets.known
        budgets = [budget for budget in budgets if budget not in before]
        if budgets and graphs.arena.rows.is_cuda:
            start = time.perf_counter()
            known = None if is_first and not before else self.budgets.measured
            self.budgets.learn(measure(graphs, forward, budgets, self.pool.bytes(), times, known))
            self._count_seconds("timed", start)
        if (measured := self.consensus.same(self.budgets.measured)) is not None:
            self.budgets.learn(measured)

    def took(self, digits: int) -> list[str]:
        """Say what captures took their time for, in seconds with so many decimal places."""
        return [f"{PARTS[part]} {seconds:.{digits}f} s" for part, seconds in [*self.seconds.items()]]

    def _count_seconds(self, part: str, start: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def _check_ranks(self) -> None:
        module = self.forward.module
        mesh = mesh_of(module)
        if mesh is not None and mesh.size() > 1 and self.consensus.alone:
            raise SpecError(
                f"the weights of {type(module).__name__} are sharded over {mesh.size()} ranks, which must capture and "
                "replay alike: make calls through vg.parallel.TensorParallelEncoder(encoder)"
            )

    def why_not(self, key: Key, static_args: dict[str, Any]) -> str | None:
        """Return the reason why calls of this key capture nothing, and warn of it once; `None` if they may."""
        if key in self._sets or len(self._sets) < MOST_SETS:
            return None
        if not self._warned_of_sets:
            self._warned_of_sets = True
            warn(
                f"{len(self._sets)} sets of static arguments have graphs, and {type(self.forward.module).__name__} was "
                f"called with another one: {self._what_varies(static_args)}. Such calls run eager, because each set "
                f"takes time and memory; {self.forward.spec.advice(f'{PER_CALL}, or round it', 'round it')} to a few "
                "values; encoder.capture(...) captures any set that calls should find"
            )
        return TOO_MANY_SETS

    def _what_varies(self, static_args: dict[str, Any]) -> str:
        """Describe the static argument with the most values so far."""
        captured = [graphs.inputs.static_args for graphs in self._sets.values()]
        values = {
            name: {static_key({name: own[name]}) for own in captured if name in own and name in static_args}
            for name in sorted(static_args)
        }
        name = max(values, key=lambda name: len(values[name]), default=None)
        if name is None or len(values[name]) < 2:
            return "its adapters, or the shape of its rows, changed"
        return f"{name}={quoted(static_args[name])}, after {len(values[name])} other values"

    def add(self, budget: Budget) -> None:
        """Add a budget, and capture it where there are graphs and calls do not wait for `capture_pending`.

        If the arena lacks room, everything is recaptured in a larger one. After an error the budget is not there.

        Raises:
            SpecError: Other ranks share the module.
        """
        self._check_may_change()
        self._drop_graphs([budget])  # one of exactly its size
        self.budgets.add(budget)
        try:
            if not all(arena.holds(budget) for arena in self.arenas.values()):
                self._recapture_all()
            for key, graphs in [] if self.lazy else [*self._sets.items()]:
                if self.budgets.enabled and self.can_capture(key, graphs.inputs):  # others wait for calls
                    self.capture(graphs.inputs, [budget])
        except BaseException:
            self.drop(budget)
            raise
        finally:
            self._keep_to_limit()

    def drop(self, budget: Budget) -> None:
        """Remove a budget, and drop its graphs once they have run.

        Raises:
            SpecError: Other ranks share the module.
        """
        self._check_may_change()
        self.budgets.drop(budget)
        self._drop_graphs([budget])

    def _check_may_change(self) -> None:
        self.check_not_staged()
        if not self.consensus.alone:
            raise SpecError(
                "the ranks of a TensorParallelEncoder have agreed on their budgets, which cannot change: make it of an "
                "encoder with all budgets that calls need"
            )

    def _keep_to_limit(self) -> None:
        """Evict budgets until graphs, arena and pool hold no more than the limit."""
        limit = self.limit
        if limit is not None and self.bytes() > limit.most:
            self._drop_graphs([size for _, size in self.exact])
        while limit is not None and len(self) and (held := self.bytes()) > limit.most:
            evicted, shared_again = limit.evict(self.own_bytes(), held, self.pool.bytes() > 0, self.lazy)
            self._drop_graphs(evicted)
            if not self.budgets.enabled:
                self._forget_all()
                if self.pool.device is not None:
                    empty_cache(self.pool.device)
                limit.warn_none_fits()
            elif shared_again:
                self._recapture_all()

    def admits(self, budget: Budget, calls: float) -> bool:
        """Return True if a budget that so many recent calls requested is worth its memory."""
        held = self.bytes() - sum(self._graph_bytes(exact=True).values())  # those make room
        return self.limit is None or self.limit.admits(budget, calls, self.own_bytes(), held)

    def _drop_graphs(self, budgets: Collection[Budget]) -> None:
        self.pool.synchronize()
        for graphs in self._sets.values():
            for budget in budgets:
                graphs.drop(budget)

    def _recapture_all(self) -> None:
        """Capture all graphs again in new memory; graphs of another mode than the module's are dropped."""
        before = [(key, graphs.inputs, graphs.budgets) for key, graphs in self._sets.items()]
        self._forget_all()
        for key, inputs, budgets in before:
            again = [one for one in self.budgets.enabled if one in budgets or one == self.budgets.enabled[-1]]
            if self.can_capture(key, inputs) and again:
                self._capture(key, inputs, again)

    def bytes(self) -> int:
        """Return the bytes that graphs, arena and pool hold; of a shared pool, all of it."""
        return self.bytes_beside_pool() + self.pool.bytes()

    def bytes_beside_pool(self) -> int:
        """Return the bytes that graphs and arena hold."""
        arenas = sum(tensor.nbytes for arena in self.arenas.values() for tensor in arena.memory)
        own = self._graph_bytes(exact=False) + self._graph_bytes(exact=True)
        return arenas + own.total()

    def own_bytes(self) -> dict[Budget, int]:
        """Return the bytes that the graphs of each budget take beside shared memory."""
        return dict(self._graph_bytes(exact=False))

    def _graph_bytes(self, exact: bool) -> Counter[Budget]:
        own: Counter[Budget] = Counter()
        for graphs in self.sets:
            own.update({one: size for one, size in graphs.bytes().items() if (one in graphs.exact) == exact})
        return own

    def check_memory(self) -> None:
        """Check that all that graphs read is unchanged since the capture; if not, graphs may be released.

        Raises:
            StaleGraphError: It has changed, other than by the module itself, with `on_change="error"`.
        """
        self._handle_own_changes()
        if self.guard is not None and (change := self.guard.find_change()):
            self._handle(change)

    def _handle(self, change: Change) -> None:
        what = change.what + (
            " since the graphs were captured (module.to(...), load_state_dict(assign=True), param.data = ..., "
            "untyped_storage().resize_(0)), and graphs go on with what was there"
        )
        if not (self._recapture or change.of_cache):
            raise StaleGraphError(
                f"{what}; call encoder.release(), and the next call recaptures, or make the encoder with "
                "capture=vg.options.Capture(on_change='recapture'). Changing weights in place needs nothing"
            )
        LOGGER.warning("%s: graphs are released, and recaptured", what)
        self.release()

    def release(self) -> None:
        """Drop everything, once the last replay has run, and enable all budgets."""
        self.check_not_staged()
        self._forget_all()
        self.forward.verdict.wrong, self.forward.verdict.changed_outside = False, None
        if self.forward.verdict.verified is not None:
            self.forward.verdict.verified.clear()
        self.budgets.enable_all()

    def _forget_all(self) -> None:
        self.pool.synchronize()
        self.losses += 1
        for graphs in self.sets:
            graphs.clear()  # whoever still has them does not keep the memory
        self._sets.clear()
        self.arenas = {}
        self.guard = self._allowance = self.forward.kept = None
        self.forward.changed.clear()
        self.mode.forget_settings()

    def poison(self) -> None:
        """Overwrite the arena's floating rows and the pool with NaN."""
        self.check_not_staged()
        for arena in self.arenas.values():
            arena.poison()
        self.pool.poison()

    def check_free(self) -> None:
        """Check that this thread neither stages rows nor computes a host buffer for a call, which a capture overwrites.

        Raises:
            InputError: It does.
        """
        self.check_not_staged()
        for arena in self.arenas.values():
            if arena.loading:
                arena.raise_loading()

    def check_not_staged(self) -> None:
        """Check that this thread is not writing rows into the arena.

        Raises:
            InputError: It is.
        """
        if self.staged:
            raise InputError(
                "this thread is writing rows inside `with encoder.stage(...)`, and another call would overwrite them; "
                "read stage.output or leave the block first"
            )
