"""What an encoder holds from capture to release."""

import gc
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlen_graphs.arena import Arena
from varlen_graphs.budgets import Budget
from varlen_graphs.call import StaticKey, static_key
from varlen_graphs.capture.agreement import Agreement
from varlen_graphs.capture.attributes import Attributes
from varlen_graphs.capture.base import Backend
from varlen_graphs.capture.guard import Guard
from varlen_graphs.capture.owners import with_owners
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.deferred import Deferred
from varlen_graphs.errors import CaptureError, InputError, SpecError, StaleGraphError
from varlen_graphs.forward import Forward
from varlen_graphs.graphs import Graphs, reason_of
from varlen_graphs.in_use import InUse
from varlen_graphs.measure import measure
from varlen_graphs.sharded import mesh_of
from varlen_graphs.spec import BufferSpec
from varlen_graphs.state import State
from varlen_graphs.table import ItemTable
from varlen_graphs.warn import warn

MANY_KEYS = 8
"""After so many sets of static arguments a warning says what they cost."""

LOGGER = logging.getLogger("varlen_graphs")

Key = tuple[StaticKey, Hashable]
"""What graphs are kept by: static arguments, and the adapters at work."""


class Captured:
    """One arena, the weights, and the graphs of each set of static arguments and of adapters at work.

    Changed under the pool's lock only.

    Args:
        module: The module whose weights the graphs read.
        spec: The declaration.
        budgets: Which graphs to capture.
        forward: What to capture.
        state: The state to capture in.
        pool: Where.
        in_use: Told what replays cost, once it was measured, and which budgets could not be captured.
        on_change: What happens when memory that graphs read is found elsewhere.

    Attributes:
        arena: What all graphs read; `None` before the first capture.
        deferred: What graphs found wrong with layouts on the device; kept when graphs are released.
        staged: Whether a caller is writing rows into the arena, which only others in the same thread could disturb.
        seconds: How long the parts of the first capture took.
        kept: Tensors that captured runs made and somebody keeps, for people.
        failure: Why the last capture gave no graph at all, if it did not, for people.
        releases: How often graphs were dropped.
        agreement: With the other ranks that capture the module, if there are any.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: BufferSpec,
        budgets: Sequence[Budget],
        forward: Forward,
        state: State,
        pool: Pool,
        in_use: InUse,
        on_change: Literal["error", "recapture"],
    ) -> None:
        self.arena: Arena | None = None
        self.deferred: Deferred | None = None
        self.staged = False
        self.seconds: dict[str, float] = {}
        self.kept: list[str] = []
        self.failure: str | None = None
        self.releases = 0
        self.agreement = Agreement()
        self._module = module
        self._spec = spec
        self._budgets = budgets
        self._forward = forward
        self._state = state
        self._pool = pool
        self._in_use = in_use
        self._on_change = on_change
        self._guard: Guard | None = None
        self._unowned: list[str] = []
        self._attributes: Attributes | None = None
        self._graphs: dict[Key, Graphs] = {}

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def graphs(
        self, statics: dict[str, Any], row_shape: Sequence[int], device: torch.device, backend: Backend
    ) -> Graphs:
        """The graphs for these static arguments, captured if this is the first call with them.

        Raises:
            StaleGraphError: What they read was found elsewhere, with `on_change="error"`. A part of it is looked at,
                another part at each call.
        """
        self._check_not_staged()
        if self._guard is not None and (what := self._guard.change_soon()):
            self._changed(what)
        key = self.key(statics)
        found = self._graphs.get(key)
        return found or self._capture(key, statics, row_shape, device, backend)

    def _capture(
        self, key: Key, statics: dict[str, Any], row_shape: Sequence[int], device: torch.device, backend: Backend
    ) -> Graphs:
        self.check_memory()
        self._check_agreement()
        self._state.warn_of_training()
        budgets = [budget for budget in self._budgets if budget not in self._in_use.out]
        if not budgets:
            raise CaptureError(
                f"nothing to capture: {self._in_use.describe()}; encoder.release() puts all in use again"
            )

        attributes = self._attributes = self._attributes or Attributes(self._module)

        def forward(rows: Tensor, table: ItemTable, host: dict[str, Tensor], compiled: bool = True) -> Any:
            with self._state.autocast(device.type):
                output = self._forward(rows, table, host, statics, compiled and device.type == "cuda")
            attributes.run()
            return output

        with torch.inference_mode(False), torch.no_grad(), on_device(device):
            if self.deferred is None or self.deferred.device != device:
                self.deferred = Deferred(self._spec, device)
            arena = self.arena or Arena(self._spec, self._budgets, tuple(row_shape), self._forward.row_dtype, device)
            self._pool.advance()
            start = time.perf_counter()
            try:
                graphs = Graphs(self._spec.declared, arena, self.deferred, budgets, forward, backend, self.agreement)
            except Exception as error:
                self.failure = reason_of(error)
                raise
            self.failure = None
            self._graphs[key], self.arena = graphs, arena
            # After the module's caches were filled.
            read = [tensor for each in self._graphs.values() for tensor in each.read]
            state = [tensor for each in self._graphs.values() for tensor in each.state]
            spec = self._spec
            also: dict[str, Any] = {b.name: b for b in spec.buffers} | {"normalize": spec.packed.normalize}
            also["forward"] = self._forward.function
            self._guard = Guard(self._module, read, state, also, attributes)
            self._tell_unowned(self._guard.unowned)
            self._tell_failed(graphs)
            self._tell_kept(backend)
            if len(self._graphs) == 1:
                captured = time.perf_counter()
                self.seconds = {"captured, kernels compiled, in": captured - start}
                if self._forward.compiled is not None and self._forward.compiled.seconds is not None:
                    self.seconds["torch.compile took of that"] = self._forward.compiled.seconds
                if device.type == "cuda":
                    timed = [budget for budget in budgets if budget not in graphs.failed]
                    held = self._pool.bytes()
                    self._in_use.learn(measure(graphs, self._forward, timed, statics, held, self.agreement))
                    self.seconds["budgets timed in"] = time.perf_counter() - captured
                self._in_use.learn(self.agreement.same(self._in_use.costs))
        if len(self._graphs) == MANY_KEYS:
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

    def _tell_failed(self, graphs: Graphs) -> None:
        """Take budgets out of use that could not be captured."""
        for budget, reason in graphs.failed.items():
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
        before, self.kept = self.kept, with_owners(backend.kept(graphs), self._module)
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

    def is_timed(self, statics: dict[str, Any]) -> bool:
        """Whether costs are those of calls with these static arguments, of which the first ones were timed."""
        return next(iter(self._graphs), None) == self.key(statics)

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
        if self._guard is not None and (what := self._guard.change()):
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
        self._pool.synchronize()
        self._pool.advance()
        self.releases += 1
        self._graphs.clear()
        self.arena = None
        self.kept = []
        self._guard = None
        self._attributes = None
        self._in_use.put_all_in()

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
