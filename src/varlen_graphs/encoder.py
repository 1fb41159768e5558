"""`GraphedEncoder`: any variable-length encoder, run as CUDA graphs."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from varlen_graphs.arena import Arena
from varlen_graphs.budgets import Budgets, resolve_budgets
from varlen_graphs.call import Call, Signature, StaticKey, static_key
from varlen_graphs.capture.base import Backend
from varlen_graphs.capture.choose import BackendName, choose_backend
from varlen_graphs.capture.memory import Weights
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.errors import BudgetError, CaptureError, InputError, SpecError
from varlen_graphs.forward import Forward
from varlen_graphs.graphs import Graphs
from varlen_graphs.layout import Layout
from varlen_graphs.outputs import Extent, flatten
from varlen_graphs.packing import Pack, Span, pack
from varlen_graphs.spec import BufferSpec
from varlen_graphs.state import State
from varlen_graphs.stats import Stats
from varlen_graphs.table import ItemTable

TOO_LARGE = "larger than every budget"

MANY_KEYS = 8
"""After so many sets of static arguments a warning says what they cost."""


class GraphedEncoder:
    """Runs a variable-length encoder as a handful of CUDA graphs.

    A call takes the module's own arguments, less the declared buffers, and gives the module's own output: a fresh
    object whose tensors are the caller's, with the active rows only, and without grad. Inside, the items of the call
    are packed into budgets, each budget's graph computes the buffers from the items and runs the module, and what no
    budget holds runs eager through the same code.

    Graphs are captured at the first call, or by `capture()`. A replay does not sync with the host; a description of the
    items that lies on the GPU is copied to the host once a call. Weights may change in place at any time; moving or
    replacing them raises `StaleGraphError` at the next call. Calls from several threads take turns.

    Args:
        module: The encoder, on its device and in its dtype.
        budgets: Row counts, `Budget`s, or a `Ladder`.
        buffer_spec: What the module's arguments and outputs are.
        forward: What to run in place of the module, called as `forward(module, **arguments)`.
        backend: `"cuda"`; `"tape"`, which replays on the CPU what a graph would (for tests without a GPU); `"eager"`,
            which captures nothing; or `"auto"`: `"cuda"` where the module is on a CUDA device, `"eager"` elsewhere,
            with one warning.
        pool: A pool to share with other encoders.
        on_miss: What happens to an item that no budget holds: `"eager"`, or `"error"`.

    Attributes:
        module: As given.
        spec: As given.
        budgets: The budgets, ascending.
        pool: The pool.
        stats: What happened so far.

    Raises:
        SpecError: The declaration does not match the module.
        BudgetError: A budget that no item could use.
    """

    def __init__(
        self,
        module: nn.Module,
        budgets: Budgets,
        buffer_spec: BufferSpec,
        *,
        forward: Callable[..., Any] | None = None,
        backend: BackendName = "auto",
        pool: Pool | None = None,
        on_miss: Literal["eager", "error"] = "eager",
    ) -> None:
        _check_choice("backend", backend, get_args(BackendName))
        _check_choice("on_miss", on_miss, ("eager", "error"))
        self.module = module
        self.spec = buffer_spec
        self.budgets = resolve_budgets(budgets, buffer_spec.row_multiple)
        buffer_spec.check_budgets(self.budgets)
        self.pool = pool or Pool()
        self.stats = Stats()
        self._signature = Signature(module, forward, buffer_spec)
        self._forward = Forward(module, forward, buffer_spec, self._signature)
        self._backend_name: BackendName = backend
        self._on_miss = on_miss
        self._state = State(module)
        self._arena: Arena | None = None
        self._weights: Weights | None = None
        self._graphs: dict[StaticKey, Graphs] = {}
        self._warned = False
        weakref.finalize(self, self.pool.synchronize).atexit = False  # no memory goes while a replay may read it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call.

        Raises:
            InputError: An argument that is missing, unknown, undeclared, or on the wrong device.
            LayoutError: Items that make no sense, or do not match the rows.
            BudgetError: An item that fits no budget, with `on_miss="error"`.
            CaptureError: The first call found something that cannot be captured.
            StaleGraphError: Weights were moved or replaced since the capture.
        """
        call = self._bind(args, kwargs)
        self.stats.count_call(len(call.layout))
        backend, reason = None, self._why_eager(call)
        if reason is None:
            backend = self._backend(call.rows.device)
            reason = None if backend else "no CUDA graphs here"
        packs = [] if reason else pack([self.spec.demand(item) for item in call.layout.items], self.budgets)
        if packs and all(one.budget is None for one in packs):
            self._check_miss(call.layout, packs[0])
            reason = TOO_LARGE
        if reason or backend is None:
            self.stats.count_eager(str(reason))
            return self._run_eager(call)
        return self._replay(call, packs, backend)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same call without graphs and without padding, for comparison: through the same code where it can be."""
        return self._run_eager(self._bind(args, kwargs))

    def capture(self, **statics: Any) -> "GraphedEncoder":
        """Capture the graphs now, for calls with these static arguments. Does nothing where calls run eager.

        Allocates the arena, the outputs, and the graphs' pool. Synchronizes with the host.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            InputError: A static argument the module does not take.
            CaptureError: Something in the module cannot be captured, or the module's state is not that of construction.
        """
        packed, device = self.spec.packed, self._forward.device
        if packed.shape is None or device is None:
            raise SpecError(
                f"the shape of {packed.name} is not known before the first call, or the module has no parameter to tell"
                f" its device; declare rows=PackedRows({packed.name!r}, shape=...), or make a call instead"
            )
        bound, beyond = self._signature.bind_statics(statics)
        reason = beyond or self._state.change(device.type)
        if reason:
            raise CaptureError(
                f"nothing to capture: calls run eager now ({reason}); capture in the state of construction"
            )
        backend = self._backend(device)
        if backend:
            example = torch.empty(0, *packed.shape, dtype=self._forward.row_dtype, device=device)
            with self.pool.exclusive():
                self._graphs_for(bound, example, backend)
        return self

    def release(self) -> None:
        """Free graphs, arena and outputs, once what was queued has run: this waits for the last replay.

        The next call captures anew, with the weights as they are then. What torch keeps for cuBLAS by stream (32 MiB on
        an H200) stays.
        """
        with self.pool.exclusive():
            self.pool.synchronize()
            self._graphs.clear()
            self._arena = None
            self._weights = None

    def poison(self) -> None:
        """Fill the arena's floating rows, the outputs and the pool with NaN, as tests do between replays.

        Padding rows keep the NaN until a replay writes them; no active row may change because of it.
        """
        with self.pool.exclusive():
            if self._arena is not None:
                self._arena.poison()
            for graphs in self._graphs.values():
                graphs.poison()
            self.pool.poison()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._signature.bind(args, kwargs)
        rows, name, device, expected = call.rows, self.spec.packed.name, self._forward.device, self._forward.row_dtype
        if device is not None and rows.device != device:
            raise InputError(
                f"{name} is on {rows.device}, the module on {device}; move it first, for example {name}.to('{device}')"
            )
        if rows.dtype != expected and not (rows.is_floating_point() and expected.is_floating_point):
            raise InputError(
                f"{name} is {rows.dtype}: expected {expected}; floating rows are cast, others are not: convert them, or"
                f" declare rows=PackedRows({name!r}, dtype={rows.dtype})"
            )
        return call

    def _why_eager(self, call: Call) -> str | None:
        """Why no graph can answer this call, if so."""
        if call.beyond:
            return call.beyond
        return "forward hooks" if self._state.has_hooks() else self._state.change(call.rows.device.type)

    def _run_eager(self, call: Call) -> Any:
        """Run a call without a graph: by the original module where `forward` in its place would miss something."""
        if self._signature.original_takes_call and (call.beyond or self._state.has_hooks()):
            return self._forward.original(call)
        return self._forward.exact(call.rows, call.layout, call.statics, call.beyond)

    def _replay(self, call: Call, packs: list[Pack], backend: Backend) -> Any:
        layout, device = call.layout, call.rows.device
        everything = Span(0, call.rows.shape[0], 0, len(layout))
        outputs: list[Tensor] = []
        with torch.no_grad(), on_device(device), self.pool.exclusive():
            graphs = self._graphs_for(call.statics, call.rows, backend)
            self._arena.check(call.rows)  # type: ignore[union-attr]
            for one in packs:
                for at, (part, extent) in enumerate(self._run_pack(graphs, call, one)):
                    if at == len(outputs):
                        shape = (extent.place(everything).stop, *part.shape[1:])
                        outputs.append(torch.empty(shape, dtype=part.dtype, device=device))
                    for there, here in one.spans(layout):
                        outputs[at][extent.place(there)].copy_(part[extent.place(here)])
            self._weights.check()  # type: ignore[union-attr]  # while the GPU works; what graphs read is held either way
        return graphs.rebuild(outputs)

    def _run_pack(self, graphs: Graphs, call: Call, one: Pack) -> list[tuple[Tensor, Extent]]:
        layout = one.layout(call.layout)
        active = sum(layout.rows)
        if one.budget is None:
            self._check_miss(call.layout, one)
            self.stats.count_eager(TOO_LARGE)
            start = sum(call.layout.rows[: one.items[0]])
            output = self._forward.exact(call.rows[start : start + active], layout, call.statics)
            parts = flatten(output, self.spec.outputs)
            return list(zip(parts.tensors, parts.extents, strict=True))
        self.stats.count_replay(one.budget, active)
        return graphs.replay(call.rows, call.layout, one, one.budget)

    def _graphs_for(self, statics: dict[str, Any], rows: Tensor, backend: Backend) -> Graphs:
        """The graphs for these static arguments, captured if this is the first call with them."""
        key = static_key(statics)
        if key not in self._graphs:
            if self._weights is not None:
                self._weights.check()
            device_type = rows.device.type
            self._state.warn_of_training()

            def forward(rows: Tensor, table: ItemTable, host: dict[str, Tensor]) -> Any:
                with self._state.autocast(device_type):
                    return self._forward(rows, table, host, statics)

            with torch.inference_mode(False), torch.no_grad(), on_device(rows.device):
                arena = self._arena or Arena(
                    self.spec, self.budgets, tuple(rows.shape[1:]), self._forward.row_dtype, rows.device
                )
                self._graphs[key] = Graphs(self.spec.outputs, arena, self.budgets, forward, backend)
                self._arena = arena
                self._weights = self._weights or Weights(self.module)  # after the module's caches were filled
            if len(self._graphs) == MANY_KEYS:
                warnings.warn(
                    f"{len(self._graphs)} sets of static arguments were captured, the last with {statics}: each takes "
                    "time and memory; what changes from call to call belongs in a buffer or a column of the layout",
                    stacklevel=4,
                )
        return self._graphs[key]

    def _backend(self, device: torch.device) -> Backend | None:
        backend = choose_backend(self._backend_name, device, self.pool)
        if backend is None and self._backend_name == "auto" and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.module).__name__} is on {device}, where there are no CUDA graphs: calls run eager. Pass "
                "backend='tape' to replay on the CPU what a graph would, or backend='eager' to say so.",
                stacklevel=3,
            )
        return backend

    def _check_miss(self, layout: Layout, miss: Pack) -> None:
        if self._on_miss == "error":
            item = layout.items[miss.items[0]]
            raise BudgetError(
                f"item {miss.items[0]} is {item[:3]} and needs {self.spec.demand(item)}, but the largest budget is "
                f"{self.budgets[-1]}; add a larger budget, or set on_miss='eager'"
            )

    def __repr__(self) -> str:
        rows = f"{self.budgets[0].rows}..{self.budgets[-1].rows} rows"
        captured = sum(len(graphs) for graphs in self._graphs.values())
        return (
            f"GraphedEncoder({type(self.module).__name__}, {len(self.budgets)} budgets of {rows}, {captured} captured)"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
