"""What an encoder holds from capture to release."""

import gc
import logging
import time
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.capture.agreement import Agreement
from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.capture.state import State
from varlen_graphs.errors import CaptureError, InputError, SpecError, StaleGraphError, warn
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.calibrate import measure
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.gpu_checks import Deferred
from varlen_graphs.graphs.graph_set import Graphs, reason_of
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.routing.in_use import InUse
from varlen_graphs.routing.limit import Limit
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call, StaticKey, static_key
from varlen_graphs.watch.attributes import AttributeSnapshot
from varlen_graphs.watch.module_guard import ModuleGuard
from varlen_graphs.watch.owners import describe_with_owners
from varlen_graphs.watch.sharded import mesh_of

MANY_KEYS = 8
"""After so many sets of static arguments a warning says what they cost."""

LOGGER = logging.getLogger("varlen_graphs")

Key = tuple[StaticKey, Hashable]
"""What graphs are kept by: static arguments, and the adapters at work."""


class Basis(NamedTuple):
    """What a set of graphs is captured for, whichever adapters are at work."""

    statics: dict[str, Any]
    row_shape: tuple[int, ...]
    device: torch.device
    backend: Backend


class NoBudgetError(CaptureError):
    """No budget is in use, so there is nothing to capture, and calls run eager."""


class Captured:
    """One arena, the weights, and the graphs of each set of static arguments and of adapters at work.

    Changed under the pool's lock only.

    Args:
        module: The module whose weights the graphs read.
        spec: The declaration.
        forward: What to capture.
        state: The state to capture in.
        pool: Where.
        in_use: The budgets. Told what replays cost, once it was measured, and which could not be captured.
        on_change: What happens when memory that graphs read is found elsewhere.
        lazy: Whether calls capture no more than they must: the largest budget, if there is no other graph.
        limit: What graphs, pool and arena may hold; `None` is any amount.

    Attributes:
        arena: What all graphs read; `None` before the first capture.
        deferred: What graphs found wrong with layouts on the device; kept when graphs are released.
        staged: Whether a caller is writing rows into the arena, which only others in the same thread could disturb.
        seconds: How long the parts of the first captures took.
        kept: Tensors that captured runs made and somebody keeps, for people.
        releases: How often graphs were released.
        losses: How often all graphs were dropped, for that or to be captured again.
        failure: Why the last capture gave no graph at all, if it did not, for people.
        lazy: As given.
        limit: As given.
        agreement: With the other ranks that capture the module, if there are any.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: BufferSpec,
        forward: Forward,
        state: State,
        pool: Pool,
        in_use: InUse,
        on_change: Literal["error", "recapture"],
        lazy: bool,
        limit: Limit | None,
    ) -> None:
        self.arena: Arena | None = None
        self.deferred: Deferred | None = None
        self.staged = False
        self.seconds: dict[str, float] = {}
        self.kept: list[str] = []
        self.failure: str | None = None
        self.releases = 0
        self.agreement = Agreement()
        self.losses = 0
        self.lazy = lazy
        self.limit = limit
        self._module = module
        self._spec = spec
        self._forward = forward
        self._state = state
        self._pool = pool
        self._in_use = in_use
        self._on_change = on_change
        self._guard: ModuleGuard | None = None
        self._unowned: list[str] = []
        self._attributes: AttributeSnapshot | None = None
        self._graphs: dict[Key, Graphs] = {}
        self._bases: dict[Key, Basis] = {}
        self._first: Key | None = None  # of the graphs that were timed

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def find(self, statics: dict[str, Any]) -> Graphs | None:
        """The graphs for these static arguments, if there are any. Needs no turn of the pool."""
        return self._graphs.get(self.key(statics))

    def is_now(self, key: Key, basis: Basis) -> bool:
        """Whether a capture now would be of the state of construction, with these adapters at work."""
        with self._state.autocast(basis.device.type):  # which is not the same in another thread
            return self._state.why_eager(basis.device.type) is None and self.key(basis.statics) == key

    def basis(self, call: Call, backend: Backend) -> Basis:
        """What to capture for a call."""
        return Basis(call.statics, tuple(self._spec.row_extent.rest(call.rows)), call.rows.device, backend)

    def graphs(
        self, statics: dict[str, Any], row_shape: Sequence[int], device: torch.device, backend: Backend
    ) -> Graphs:
        """The graphs for these static arguments; those that a call must find are captured if they are not there.

        Raises:
            NoBudgetError: There are none, and no budget is in use, which may be so only since the call was planned.
            StaleGraphError: What they read was found elsewhere, with `on_change="error"`. A part of it is looked at,
                another part at each call.
        """
        self._check_not_staged()
        if self._guard is not None and (what := self._guard.find_change_sampled()):
            self._changed(what)
        found = self._graphs.get(self.key(statics))
        if found is not None and (self.lazy or self._in_use.settled or found.complete_for is self._in_use.costs):
            return found
        return self.capture(Basis(statics, tuple(row_shape), device, backend), () if self.lazy else None)

    def capture(self, basis: Basis, wanted: Collection[Budget] | None = None, calls: float = 0.0) -> Graphs:
        """Capture what has no graph yet: of all budgets in use, or of some, which so many recent calls wanted.

        The first graph of a set is that of the largest budget in use: the pool is then as large as it has to be, and
        smaller ones find room in it. Synchronizes with the host.

        Raises:
            NoBudgetError: No budget is in use.
            StaleGraphError: What graphs read was found elsewhere, with `on_change="error"`.
        """
        self._check_not_staged()
        self.check_memory()
        key = self.key(basis.statics)
        graphs = self._graphs.get(key)
        in_use = self._in_use.those_in_use
        if graphs is None and not in_use:
            raise NoBudgetError(
                f"nothing to capture: {self._in_use.describe()}; encoder.release() puts all in use again"
            )
        budgets = in_use if wanted is None else [budget for budget in in_use if budget in wanted]
        if graphs is None and in_use[-1] not in budgets:
            budgets.append(in_use[-1])
        missing = [budget for budget in budgets if graphs is None or budget not in graphs]
        if missing:
            graphs = self._capture(key, basis, missing)
            if self.limit is not None:
                self.limit.want(wanted or (), calls)
            self._keep_to_limit()
            graphs = self._graphs.get(key, graphs)  # in new memory; empty if there is not enough for any
        assert graphs is not None  # noqa: S101 - something is missing where there is none
        if wanted is None:
            graphs.complete_for = self._in_use.costs
        return graphs

    def _keep_to_limit(self) -> None:
        """Give up the least useful budgets until what is held is no more than the limit, if there is one."""
        limit = self.limit
        while limit is not None and len(self) and (held := self.bytes()) > limit.most:
            gone, anew = limit.give_up(self._own_bytes(), held, self._pool.bytes() > 0, self.lazy)
            self._drop_graphs(gone)
            if not self._in_use.those_in_use:
                self._forget_all()
                if self._pool.device is not None and self._pool.device.type == "cuda":
                    torch.cuda.empty_cache()
                limit.tell_none_fits()
            elif anew:
                self._capture_again()

    def bytes(self) -> int:
        """What graphs, arena and pool hold; of a pool that is shared, all of it."""
        arena = sum(tensor.nbytes for tensor in self.arena.memory) if self.arena is not None else 0
        return arena + self._pool.bytes() + sum(self._own_bytes().values())

    def _own_bytes(self) -> dict[Budget, int]:
        """What the graphs of each budget take beside memory that all share."""
        own: Counter[Budget] = Counter()
        for graphs in self._graphs.values():
            own.update(graphs.bytes())
        return dict(own)

    def admits(self, budget: Budget, calls: float) -> bool:
        """Whether a budget that so many recent calls wanted is worth its memory: see `Limit.admits`."""
        return self.limit is None or self.limit.admits(budget, calls, self._own_bytes(), self.bytes())

    def _capture(self, key: Key, basis: Basis, budgets: Sequence[Budget]) -> Graphs:
        """Capture these, which have no graphs yet."""
        with self._pool.capturing():
            return self._capture_now(key, basis, budgets)

    def _capture_now(self, key: Key, basis: Basis, budgets: Sequence[Budget]) -> Graphs:
        statics, row_shape, device, backend = basis
        self._check_agreement()
        self._state.warn_of_training()
        attributes = self._attributes or AttributeSnapshot(self._module)

        def forward(rows: Tensor, table: ItemTable, host: dict[str, Tensor], compiled: bool = True) -> Any:
            with self._state.autocast(device.type):
                output = self._forward(rows, table, host, statics, compiled and device.type == "cuda")
            attributes.drop_changed()
            return output

        with torch.inference_mode(False), torch.no_grad(), on_device(device):
            if self.deferred is None or self.deferred.device != device:
                self.deferred = Deferred(self._spec, device)
            start, is_new, is_first = time.perf_counter(), key not in self._graphs, not self._graphs
            arena = self.arena or Arena(
                self._spec, self._in_use.those_in_use, row_shape, self._forward.row_dtype, device
            )
            graphs = self._graphs.get(key) or Graphs(self._spec.declared, arena, self.deferred, self.agreement)
            if is_new and self._forward.compiled is not None:
                self._forward.compiled.begin()
            self._pool.advance()
            try:
                graphs.capture(budgets, forward, backend)
            except Exception as error:
                self.failure = reason_of(error) if is_first else self.failure
                raise
            self.failure = None
            self._graphs[key], self._bases[key], self.arena = graphs, basis, arena
            self._attributes = attributes
            self._first = key if is_first else self._first
            # After the module's caches were filled.
            read = [tensor for each in self._graphs.values() for tensor in each.read]
            state = [tensor for each in self._graphs.values() for tensor in each.state]
            spec = self._spec
            also: dict[str, Any] = {b.name: b for b in spec.buffers} | {"normalize": spec.packed.normalize}
            also["forward"] = self._forward.function
            self._guard = ModuleGuard(self._module, read, state, also, attributes)
            self._tell_unowned(self._guard.unowned)
            self._tell_failed(graphs, budgets)
            self._tell_kept(backend)
            if self.is_timed(statics):
                self.seconds = {} if is_first else self.seconds
                self._count_seconds("captured, kernels compiled, in", start)
                if is_first and self._forward.compiled is not None and self._forward.compiled.seconds is not None:
                    self.seconds["torch.compile took of that"] = self._forward.compiled.seconds
                if device.type == "cuda":
                    self._time(graphs, [budget for budget in budgets if budget in graphs], statics, is_first)
                if (learned := self.agreement.same(self._in_use.learned)) is not None:
                    self._in_use.learn(learned)
        if is_new and len(self._graphs) == MANY_KEYS:
            warn(
                f"{len(self._graphs)} sets of static arguments were captured, the last with {statics}: each takes "
                "time and memory; what changes from call to call belongs in a buffer or a column of the layout"
            )
        return graphs

    def _check_agreement(self) -> None:
        """Whether ranks that share the weights agree on what they capture.

        Raises:
            SpecError: They do not.
        """
        mesh = mesh_of(self._module)
        if mesh is not None and mesh.size() > 1 and self.agreement.alone:
            raise SpecError(
                f"the weights of {type(self._module).__name__} are sharded over {mesh.size()} ranks, which must "
                "capture and replay alike: make calls through vg.parallel.TensorParallelEncoder(encoder)"
            )

    def _time(self, graphs: Graphs, budgets: Sequence[Budget], statics: dict[str, Any], is_first: bool) -> None:
        """Learn what replays of these budgets cost, as far as it is not known from an earlier start."""
        start = time.perf_counter()
        before = self._in_use.known
        known = None if is_first and not before else self._in_use.learned
        budgets = [budget for budget in budgets if budget not in before]
        if not budgets:
            return
        self._in_use.learn(measure(graphs, self._forward, budgets, statics, self._pool.bytes(), self.agreement, known))
        self._count_seconds("budgets timed in", start)

    def _count_seconds(self, part: str, start: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def _tell_failed(self, graphs: Graphs, budgets: Sequence[Budget]) -> None:
        """Take those of these budgets out of use that could not be captured."""
        failed = {budget: reason for budget, reason in graphs.failed.items() if budget in budgets}
        for budget, reason in failed.items():
            self._in_use.put_out(budget, reason)
            warn(
                f"the graph of {budget.rows} rows could not be captured and is out of use: other budgets take its calls"
                f", and what none of them holds runs eager; {reason}"
            )

    def _tell_kept(self, backend: Backend) -> None:
        """Name what the captured runs made and somebody keeps."""
        graphs = [graph for each in self._graphs.values() for graph in each]
        if backend.kept(graphs):
            gc.collect()  # what is in a cycle only, nobody keeps
        before, self.kept = self.kept, describe_with_owners(backend.kept(graphs), self._module)
        if set(self.kept).difference(before):
            warn(
                f"{len(self.kept)} tensors were made while graphs were captured, and are kept: {'; '.join(self.kept)}; "
                "they lie in the memory of the graphs, where replays overwrite them, and no graph can use that for "
                "anything else; return what is needed as an output, and drop the rest"
            )

    def _tell_unowned(self, unowned: list[str]) -> None:
        """Name what is read and cannot be looked after."""
        before, self._unowned = self._unowned, unowned
        if set(unowned).difference(before):
            warn(
                f"graphs read {len(unowned)} tensors that nothing the module reaches owns: {'; '.join(unowned)}; they "
                "are held, but where they are replaced later graphs go on reading what is held, and nothing says so; "
                "register them, or the modules they belong to, as parts of the module"
            )

    def add(self, budget: Budget) -> None:
        """Have a graph for one budget more, where there are graphs and calls are to find one.

        Where the arena has no room for it, all that there is, is captured again in a larger one. Where that is more
        than the limit, the least useful budgets are given up, as after every capture.

        Raises:
            SpecError: Other ranks share the module.
        """
        self._check_not_staged()
        self._check_alone()
        self._in_use.add(budget)
        if self.arena is not None and not self.arena.holds(budget):
            try:
                self._capture_again()
            finally:
                self._keep_to_limit()
        if not self.lazy:
            for key, basis in [*self._bases.items()]:
                if self._in_use.those_in_use and self.is_now(key, basis):  # others wait for calls
                    self.capture(basis)

    def drop(self, budget: Budget) -> None:
        """Forget a budget, and its graphs once they have run.

        Raises:
            SpecError: Other ranks share the module.
        """
        self._check_not_staged()
        self._check_alone()
        self._in_use.drop(budget)
        self._drop_graphs([budget])

    def _check_alone(self) -> None:
        if not self.agreement.alone:
            raise SpecError(
                "the ranks of a TensorParallelEncoder have agreed on their budgets, which cannot come and go: make it "
                "of an encoder with all that calls need"
            )

    def _drop_graphs(self, budgets: Collection[Budget]) -> None:
        self._pool.synchronize()
        self._pool.advance()
        for graphs in self._graphs.values():
            for budget in budgets:
                graphs.drop(budget)

    def _capture_again(self) -> None:
        """Capture what there is in new memory; graphs of another state than the module is in are dropped."""
        before = [(key, basis, self._graphs[key].budgets) for key, basis in self._bases.items()]
        self._forget_all()
        for key, basis, budgets in before:
            in_use = self._in_use.those_in_use
            again = [budget for budget in in_use if budget in budgets or budget == in_use[-1]]
            if self.is_now(key, basis) and again:
                self._capture(key, basis, again)

    def is_timed(self, statics: dict[str, Any]) -> bool:
        """Whether costs are those of calls with these static arguments, of which the first ones were timed."""
        return self._first == self.key(statics)

    def key(self, statics: dict[str, Any]) -> Key:
        """What the graphs for these static arguments are kept by."""
        if not self._graphs:
            self._state.look_anew()
        return static_key(statics), self._state.adapters()

    def check_rows(self, rows: Tensor) -> None:
        """Whether rows are where, and of the kind, that the module takes.

        Raises:
            InputError: Rows on another device, or of a dtype that is not cast.
            StaleGraphError: The module was moved to another device since the capture.
        """
        name, arena = self._spec.packed.name, self.arena  # which another thread may release
        if arena is not None:
            device, expected = arena.rows.device, arena.rows.dtype
        else:
            device, expected = self._forward.device or rows.device, self._forward.row_dtype
        if rows.device != device:
            with self._pool.exclusive():
                self.check_memory()
            device = self._forward.device or rows.device
        if rows.device != device:
            raise InputError(
                f"{name} is on {rows.device}, the module on {device}; move it first, for example {name}.to('{device}')"
            )
        if rows.dtype != expected and not (rows.is_floating_point() and expected.is_floating_point):
            raise InputError(
                f"{name} is {rows.dtype}: expected {expected}; floating rows are cast, others are not: convert them, or"
                f" declare rows=PackedRows({name!r}, dtype={rows.dtype})"
            )

    def no_rows(self) -> Tensor:
        """No rows, `[0, ...]`, of the dtype and on the device of rows.

        Raises:
            SpecError: These are not known yet.
        """
        arena, packed, device = self.arena, self._spec.packed, self._forward.device
        none = (0,) * len(self._spec.row_extent.dims)
        if arena is not None:
            return arena.rows.new_empty(*none, *arena.rows.shape[1:])
        if packed.shape is None or device is None:
            raise SpecError(
                f"the shape of {packed.name} is not known before the first call, or the module has no parameter to tell"
                f" its device; declare rows=PackedRows({packed.name!r}, shape=...), or make a call instead"
            )
        return torch.empty(*none, *packed.shape, dtype=self._forward.row_dtype, device=device)

    def check_memory(self) -> None:
        """Whether all that graphs read is where, and what, it was at capture; if not, graphs may be dropped.

        Raises:
            StaleGraphError: It is not, with `on_change="error"`.
        """
        if self._guard is not None and (what := self._guard.find_change()):
            self._changed(what)

    def _changed(self, what: str) -> None:
        what += (
            " since the graphs were captured (module.to(...), load_state_dict(assign=True), param.data = ..., "
            "untyped_storage().resize_(0)), and graphs go on with what was there"
        )
        if self._on_change == "error":
            raise StaleGraphError(
                f"{what}; call encoder.release(), and the next call captures anew, or make the encoder with "
                "on_change='recapture'. Changing weights in place needs nothing"
            )
        LOGGER.warning("%s: graphs are released, and captured anew", what)
        self.release()

    def release(self) -> None:
        """Drop everything, once the last replay has run."""
        self._check_not_staged()
        self._forget_all()
        self.releases += 1
        self._in_use.put_all_in()

    def _forget_all(self) -> None:
        self._pool.synchronize()
        self._pool.advance()
        self.losses += 1
        for graphs in self._graphs.values():
            graphs.clear()  # whoever still has them does not keep the memory
        self._graphs.clear()
        self._bases.clear()
        self._first = None
        self.arena = None
        self.kept = []
        self._guard = None
        self._attributes = None

    def poison(self) -> None:
        """Overwrite the arena's floating rows and the pool with NaN."""
        self._check_not_staged()
        self._pool.advance()
        if self.arena is not None:
            self.arena.poison()
        self._pool.poison()

    def _check_not_staged(self) -> None:
        if self.staged:
            raise InputError(
                "this thread is writing rows inside `with encoder.stage(...)`, where the rows of another call would go;"
                " read stage.output or leave the block first"
            )
