"""All graphs of an encoder and their static memory."""

import logging
from collections.abc import Collection
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.memory import empty_cache
from varlen_graphs.capture.mode import Mode
from varlen_graphs.capture.pool import Pool
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.static_args import StaticKey
from varlen_graphs.errors import CaptureError, InputError, SpecError, StaleGraphError
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.capturer import CaptureInputs, Capturer, Key
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.options.capture import Capture
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.memory_limit import MemoryLimit
from varlen_graphs.watch.slots import Change

LOGGER = logging.getLogger("varlen_graphs")


class Usable(NamedTuple):
    """Graphs that a call may use.

    Attributes:
        graphs: Its set of graphs; `None` before the first capture.
        costs: The budgets that the call may use, and their costs.
        timed: True if costs were measured for calls like this one.
        refused: Budgets whose graphs failed the proof, which the call must not use.
    """

    graphs: GraphSet | None
    costs: Costs
    timed: bool
    refused: Collection[Budget] = ()


class GraphStore:
    """One arena, and the graphs of each set of static arguments and adapters. Changed under the pool's lock only.

    Args:
        forward: The forward to capture.
        mode: The mode to capture in.
        pool: The pool to capture into.
        budgets: The budgets. It learns costs, and disables budgets that cannot be captured.
        limit: A limit on memory; `None` is any amount.
        options: `lazy` and `on_change` of the encoder.

    Attributes:
        forward, mode, pool, budgets, limit: As given.
        capturer: Captures the graphs and holds them with the arena.
        staged: True while a caller writes rows into the arena; only its own thread can interfere then.
        losses: Number of times that all graphs were dropped.
        lazy: True if calls never capture.
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
        self.capturer = Capturer(forward, mode, pool, budgets)
        self.staged = False
        self.losses = 0
        self.lazy, self._recapture = options.lazy, options.on_change == "recapture"
        self._sets, self._inputs = self.capturer.sets, self.capturer.inputs

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    @property
    def arena(self) -> Arena | None:
        """Static inputs of graphs, those of the first row shape; `None` before the first capture."""
        return next(iter(self.capturer.arenas.values()), None)

    @property
    def sets(self) -> list[GraphSet]:
        """The set of graphs of each key."""
        return [*self._sets.values()]

    def find(self, static_args: StaticKey) -> GraphSet | None:
        """Return the graphs for these static arguments, if there are any. Needs no turn of the pool."""
        return self._sets.get(self.key(static_args))

    def key(self, static_args: StaticKey) -> Key:
        """Return the key of the graphs for these static arguments."""
        return static_args, self.mode.adapters()

    def usable(self, static_args: StaticKey, captured: bool = False) -> Usable:
        """Return the graphs that a call with these static arguments may use.

        Args:
            static_args: The static arguments.
            captured: If True, with the budgets alone that have a graph; so it is always if calls never capture.

        Raises:
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`. Each call checks a part.
            CaptureError: Captures have changed what the module keeps outside of itself.
        """
        if self.staged:
            self.check_not_staged()
        if (why := self.forward.verdict.changed_outside) is not None:
            raise CaptureError(f"{why}; encoder.release() tries again, once the module is as it should be")
        guard = self.capturer.dependencies.guard
        if guard is not None and (change := guard.find_change_sampled()):
            self._handle(change)
        graphs, costs = self._sets.get((static_args, self.mode.adapters())), self.budgets.costs
        if graphs is None:
            return Usable(None, costs.without(costs.replays) if self.lazy else costs, False)
        return Usable(graphs, graphs.usable(costs, captured or self.lazy), graphs.timed, graphs.refused)

    def inputs(self, call: Call) -> CaptureInputs:
        """Return the inputs to capture graphs for a call."""
        return CaptureInputs(call.static_args, self.forward.spec.row_extent.rest(call.shape), call.rows.device)

    def can_capture(self, key: Key, inputs: CaptureInputs) -> bool:
        """Return True if a capture now would be in the mode of construction, with the adapters of this key."""
        self.mode.refresh()
        with self.mode.autocast(inputs.device.type):  # another thread may have another one
            return self.mode.eager_reason() is None and self.key(key[0]) == key

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
        smaller ones find room in it. If none of these can be captured, others are tried. Synchronizes with the host.

        Raises:
            InputError: This thread stages rows, or computes a host buffer for a call.
            CaptureError: No budget is enabled, or none could be captured.
            StaleGraphError: Memory that graphs read has changed, with `on_change="error"`.
        """
        self.check_not_staged()
        self.capturer.check_not_loading()
        self.check_memory()
        key = self.key(self.forward.spec.key(inputs.static_args, inputs.row_shape))
        graphs, enabled = self._sets.get(key), self.budgets.enabled
        if graphs is None and not enabled:
            raise CaptureError(
                f"nothing to capture: {self.budgets.describe()}; encoder.release() enables all budgets again"
            )
        missing = [budget for budget in enabled if graphs is None or graphs.lacks(budget)]
        first = missing[-1:] if not graphs else []  # none yet, or all of them were dropped
        wanted = missing if requested is None else [b for b in missing if b in requested or b in first]
        if wanted:
            spare = [budget for budget in missing if budget not in wanted] if first else []
            self.capturer.capture(key, inputs, wanted, spare, call=call)
            if self.limit is not None:
                self.limit.request(requested or (), calls)
            self._keep_to_limit()

    def add(self, budget: Budget) -> None:
        """Add a budget, and capture it where there are graphs and calls do not wait for `capture_pending`.

        If the arena lacks room, everything is recaptured in a larger one. After an error the budget is not there.

        Raises:
            SpecError: Other ranks share the module.
        """
        self._check_may_change()
        self.budgets.add(budget)
        try:
            if not all(arena.holds(budget) for arena in self.capturer.arenas.values()):
                self._recapture_all()
            for key, inputs in [] if self.lazy else [*self._inputs.items()]:
                if self.budgets.enabled and self.can_capture(key, inputs):  # others wait for calls
                    self.capture(inputs, [budget])
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
        if not self.capturer.consensus.alone:
            raise SpecError(
                "the ranks of a TensorParallelEncoder have agreed on their budgets, which cannot change: make it of an "
                "encoder with all budgets that calls need"
            )

    def _keep_to_limit(self) -> None:
        """Evict budgets until graphs, arena and pool hold no more than the limit."""
        limit = self.limit
        if limit is not None and self.bytes() > limit.most:
            self.capturer.drop_exact([*self.capturer.exact])
        while limit is not None and len(self) and (held := self.bytes()) > limit.most:
            evicted, shared_again = limit.evict(self.capturer.own_bytes(), held, self.pool.bytes() > 0, self.lazy)
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
        held = self.bytes() - self.capturer.exact_bytes()  # those make room
        return self.limit is None or self.limit.admits(budget, calls, self.capturer.own_bytes(), held)

    def _drop_graphs(self, budgets: Collection[Budget]) -> None:
        self.pool.synchronize()
        for graphs in self._sets.values():
            for budget in budgets:
                graphs.drop(budget)

    def _recapture_all(self) -> None:
        """Capture all graphs again in new memory; graphs of another mode than the module's are dropped."""
        before = [(key, inputs, self._sets[key].budgets) for key, inputs in self._inputs.items()]
        self._forget_all()
        for key, inputs, budgets in before:
            again = [one for one in self.budgets.enabled if one in budgets or one == self.budgets.enabled[-1]]
            if self.can_capture(key, inputs) and again:
                self.capturer.capture(key, inputs, again)

    def bytes(self) -> int:
        """Return the bytes that graphs, arena and pool hold; of a shared pool, all of it."""
        return self.capturer.bytes() + self.pool.bytes()

    def check_memory(self) -> None:
        """Check that all memory that graphs read is unchanged since the capture; if not, graphs may be released.

        Raises:
            StaleGraphError: It has changed, with `on_change="error"`.
        """
        if (guard := self.capturer.dependencies.guard) is not None and (change := guard.find_change()):
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
        if self.forward.verdict.proven is not None:
            self.forward.verdict.proven.clear()
        self.budgets.enable_all()

    def _forget_all(self) -> None:
        self.pool.synchronize()
        self.losses += 1
        self.capturer.forget()

    def poison(self) -> None:
        """Overwrite the arena's floating rows and the pool with NaN."""
        self.check_not_staged()
        for arena in self.capturer.arenas.values():
            arena.poison()
        self.pool.poison()

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
