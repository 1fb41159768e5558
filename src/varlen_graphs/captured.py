"""What an encoder holds from capture to release."""

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.arena import Arena
from varlen_graphs.budgets import Budget
from varlen_graphs.call import StaticKey, static_key
from varlen_graphs.capture.base import Backend
from varlen_graphs.capture.memory import Weights
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.costs import Costs
from varlen_graphs.deferred import Deferred
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.forward import Forward
from varlen_graphs.graphs import Graphs
from varlen_graphs.measure import measure
from varlen_graphs.spec import BufferSpec
from varlen_graphs.state import State
from varlen_graphs.table import ItemTable

MANY_KEYS = 8
"""After so many sets of static arguments a warning says what they cost."""

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
        learn: Told what replays cost, once it was measured.

    Attributes:
        arena: What all graphs read; `None` before the first capture.
        deferred: What graphs found wrong with layouts on the device; kept when graphs are released.
        staged: Whether a caller is writing rows into the arena, which only others in the same thread could disturb.
        seconds: How long the parts of the first capture took.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: BufferSpec,
        budgets: Sequence[Budget],
        forward: Forward,
        state: State,
        pool: Pool,
        learn: Callable[[Costs], None],
    ) -> None:
        self.arena: Arena | None = None
        self.deferred: Deferred | None = None
        self.staged = False
        self.seconds: dict[str, float] = {}
        self._module = module
        self._spec = spec
        self._budgets = budgets
        self._forward = forward
        self._state = state
        self._pool = pool
        self._learn = learn
        self._weights: Weights | None = None
        self._graphs: dict[Key, Graphs] = {}

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def graphs(
        self, statics: dict[str, Any], row_shape: Sequence[int], device: torch.device, backend: Backend
    ) -> Graphs:
        """The graphs for these static arguments, captured if this is the first call with them."""
        self._check_not_staged()
        key = self._key(statics)
        found = self._graphs.get(key)
        return found or self._capture(key, statics, row_shape, device, backend)

    def _capture(
        self, key: Key, statics: dict[str, Any], row_shape: Sequence[int], device: torch.device, backend: Backend
    ) -> Graphs:
        self.check_weights()
        self._state.warn_of_training()

        def forward(rows: Tensor, table: ItemTable, host: dict[str, Tensor], compiled: bool = True) -> Any:
            with self._state.autocast(device.type):
                return self._forward(rows, table, host, statics, compiled and device.type == "cuda")

        with torch.inference_mode(False), torch.no_grad(), on_device(device):
            if self.deferred is None or self.deferred.device != device:
                self.deferred = Deferred(self._spec, device)
            arena = self.arena or Arena(self._spec, self._budgets, tuple(row_shape), self._forward.row_dtype, device)
            self._pool.advance()
            start = time.perf_counter()
            self._graphs[key] = Graphs(self._spec.declared, arena, self.deferred, self._budgets, forward, backend)
            self.arena = arena
            self._weights = self._weights or Weights(self._module)  # after the module's caches were filled
            if len(self._graphs) == 1:
                captured = time.perf_counter()
                self.seconds = {"captured, kernels compiled, in": captured - start}
                if self._forward.compiled is not None and self._forward.compiled.seconds is not None:
                    self.seconds["torch.compile took of that"] = self._forward.compiled.seconds
                if device.type == "cuda":
                    self._learn(measure(self._graphs[key], self._forward, self._budgets, statics, self._pool.bytes()))
                    self.seconds["budgets timed in"] = time.perf_counter() - captured
        if len(self._graphs) == MANY_KEYS:
            warnings.warn(
                f"{len(self._graphs)} sets of static arguments were captured, the last with {statics}: each takes "
                "time and memory; what changes from call to call belongs in a buffer or a column of the layout",
                stacklevel=6,
            )
        return self._graphs[key]

    def is_timed(self, statics: dict[str, Any]) -> bool:
        """Whether costs are those of calls with these static arguments, of which the first ones were timed."""
        return next(iter(self._graphs), None) == self._key(statics)

    def _key(self, statics: dict[str, Any]) -> Key:
        if not self._graphs:
            self._state.forget_adapters()
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
            self.check_weights()
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

    def check_weights(self) -> None:
        """Whether all weights are where they were.

        Raises:
            StaleGraphError: Some were moved or replaced.
        """
        if self._weights is not None:
            self._weights.check()

    def check_some_weights(self) -> None:
        """The same for a part of them, another part at each call.

        Raises:
            StaleGraphError: Some were moved or replaced.
        """
        if self._weights is not None:
            self._weights.check_some()

    def release(self) -> None:
        """Drop everything."""
        self._check_not_staged()
        self._pool.advance()
        self._graphs.clear()
        self.arena = None
        self._weights = None

    def poison(self) -> None:
        """Overwrite the arena's floating rows and the pool with NaN."""
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
