"""`GraphedEncoder`: any variable-length encoder, run as CUDA graphs."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from varlen_graphs.borrowed import Borrowed
from varlen_graphs.budgets import Budgets, resolve_budgets
from varlen_graphs.call import Call, Signature
from varlen_graphs.capture.base import Backend
from varlen_graphs.capture.choose import BackendName
from varlen_graphs.capture.pool import Pool
from varlen_graphs.captured import Basis, Captured
from varlen_graphs.choice import Choice
from varlen_graphs.costs import Costs
from varlen_graphs.errors import CaptureError, InputError, SpecError
from varlen_graphs.forward import Forward
from varlen_graphs.in_use import InUse
from varlen_graphs.layout import Layout
from varlen_graphs.packing import Pack
from varlen_graphs.padded import pack_rows
from varlen_graphs.page import page
from varlen_graphs.planner import Planner
from varlen_graphs.replay import EAGER_IS_FASTER, Replays
from varlen_graphs.report import report
from varlen_graphs.spec import BufferSpec
from varlen_graphs.stage import Stage, staged
from varlen_graphs.state import State
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.trace import Trace
from varlen_graphs.verify.examples import Example, with_other_rows
from varlen_graphs.verify.in_service import InService
from varlen_graphs.verify.verifier import Verified, Verifier


class GraphedEncoder:
    """Runs a variable-length encoder as a handful of CUDA graphs.

    A call takes the module's own arguments, less the declared buffers, and gives the module's own output: a fresh
    object whose tensors are the caller's, with the active rows only, and without grad. Inside, the items of the call
    are packed into budgets, each budget's graph computes the buffers from the items and runs the module, and what no
    budget holds runs eager through the same code.

    Graphs are captured at the first call, or by `capture()`. A replay does not sync with the host. Weights may change
    in place at any time. Moving, casting or reloading the module raises `StaleGraphError` at the next call; replacing
    a single one of hundreds of weights does within 64 calls, and at `check()`. Calls from several threads take turns.

    A budget whose graph cannot be captured is out of use, with a warning: larger ones take its calls, or several
    smaller ones do, and what no budget in use holds runs eager. Where none can be captured, the error is raised.

    Items that are described on the GPU (integers `[items, 3]`, or lengths `[items]`, columns too) are not copied to the
    host where one budget holds so many rows and items whatever they are. The GPU checks them: if they are wrong, the
    floating outputs of the call are NaN, and the first call after the GPU got there, or `check()`, raises
    `LayoutError`. Otherwise, where there are host buffers, and of padded batches, a call costs one copy to the host.

    Args:
        module: The encoder, on its device and in its dtype.
        budgets: Row counts, `Budget`s, or a `Ladder`; for padded batches `Budget.padded(...)`s or a `PaddedLadder`.
        buffer_spec: What the module's arguments and outputs are.
        forward: What to run in place of the module, called as `forward(module, **arguments)`.
        backend: `"cuda"`; `"tape"`, which replays on the CPU what a graph would (for tests without a GPU); `"eager"`,
            which captures nothing; or `"auto"`: `"cuda"` where the module is on a CUDA device, `"eager"` elsewhere,
            with one warning. For the tape a tensor on the CPU is what one on the GPU is for a graph.
        pool: A pool to share with other encoders.
        on_miss: What happens to an item that no budget holds: `"eager"`, or `"error"`.
        outputs: `"owned"`, or `"borrowed"`: calls return a `Borrowed`, and copy no outputs where one replay did.
        min_segment_rows: A promise for layouts on the GPU, whose frames or windows the host cannot count: they have on
            average at least so many rows. Without it each may be one merge block, and few budgets have as many
            segments. A call that breaks it is wrong, as above, if its budget is too small.
        compile: Whether torch's compiler fuses the forward first: once, for all budgets. It takes some tens of seconds,
            at the first capture. The tape and eager calls run the forward as it is.
        on_change: What happens when memory that graphs read is found elsewhere, or is read as something else:
            `"error"`, or `"recapture"`: the graphs are released, and captured anew in the same call, which is logged as
            a warning of `varlen_graphs`.
        off: Tells of the module why a call made now must run without graphs, or `None`: asked at each call, for what
            changes the number of outputs by their content, such as the pruning of video tokens. The reason is counted
            in `stats.eager`, and outputs are as the module gives them.
        verify: So many first calls of each budget, of each set of static arguments, are compared with the module itself
            run eager. A budget that is wrong is not used any more: its calls get other budgets, or run eager. The call
            that found it gets the eager output, `report()` and `stats` show it, and the logger `varlen_graphs` tells
            the evidence. Each of these calls takes an eager one more, syncs, and copies items on the GPU to the host.
        strict: Whether a call whose graph is wrong raises `VerificationError` instead.
        tolerance: How far outputs may be from the module's own, relative L2 of each item; see `verify`.

    Attributes:
        module: As given.
        spec: As given.
        budgets: The budgets, ascending.
        pool: The pool.
        stats: What happened so far.

    Raises:
        SpecError: The declaration does not match the module, or an option is none of those above.
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
        outputs: Literal["owned", "borrowed"] = "owned",
        min_segment_rows: int = 1,
        compile: bool = False,
        on_change: Literal["error", "recapture"] = "error",
        off: Callable[[nn.Module], str | None] | None = None,
        verify: int = 0,
        strict: bool = False,
        tolerance: float | None = None,
    ) -> None:
        _check_choice("backend", backend, get_args(BackendName))
        _check_choice("on_miss", on_miss, ("eager", "error"))
        if not isinstance(verify, int) or verify < 0:
            raise SpecError(f"verify={verify!r}: expected how many calls of each budget to compare, 0 for none")
        _check_choice("outputs", outputs, ("owned", "borrowed"))
        _check_choice("on_change", on_change, ("error", "recapture"))
        self.module = module
        self.spec = buffer_spec
        self.budgets = resolve_budgets(budgets, buffer_spec.row_multiple)
        buffer_spec.check_budgets(self.budgets)
        self.pool = pool or Pool()
        self.stats = Stats()
        self._off = off
        self._lends = outputs == "borrowed"
        self._in_use = InUse(Costs.in_rows(self.budgets))
        self._planner = Planner(buffer_spec, self._in_use, on_miss, min_segment_rows)
        self._signature = Signature(module, forward, buffer_spec)
        self._forward = Forward(module, forward, buffer_spec, self._signature, compile)
        self._state = State(module)
        self._choice = Choice(module, self._state, backend, self.pool)
        self._captured = Captured(
            module, buffer_spec, self._forward, self._state, self.pool, self._in_use, on_change, lazy=False
        )
        self._replays = Replays(self._captured, self._planner, self._forward, self.pool, self.stats, self._lends)
        self._tolerance = tolerance
        self._checks = (
            InService(verify, strict, tolerance, self._captured, self._forward, self._planner, self.pool, self.stats)
            if verify
            else None
        )
        self._traces: list[Trace] = []
        weakref.finalize(self, self.pool.synchronize).atexit = False  # no memory goes while a replay may read it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call.

        Returns:
            The module's output; with `outputs="borrowed"` a `Borrowed`.

        Raises:
            InputError: An argument that is missing, unknown, undeclared, or on the wrong device.
            LayoutError: Items that make no sense, or do not match the rows: of this call, or of an earlier one whose
                layout only the GPU has seen.
            BudgetError: An item that fits no budget, with `on_miss="error"`.
            CaptureError: The first call found something that cannot be captured.
            StaleGraphError: Weights, or what else graphs read, were moved or replaced since the capture, or the process
                was forked.
        """
        self._replays.tell_deferred()
        call = self._bind(args, kwargs)
        reason, backend = self._choice.of(call)
        if backend is not None and (budget := self._planner.unseen(call)) is not None:
            self.stats.count_call(call.items)
            for trace in self._traces:
                trace.count(self._planner.most(call))
            if self._checks is not None:
                packs = [Pack(budget, range(call.items))]
                return self._checks.run(call, packs, partial(self._replays.run_unseen, call, budget, backend))
            return self._replays.run_unseen(call, budget, backend)
        return self._encode(call, self._read_layout(call), reason, backend)

    def _encode(self, call: Call, layout: Layout, reason: str, backend: Backend | None) -> Any:
        """The output of items that the host knows: of a call, or of a part of one."""
        self._count(layout)
        packs = self._planner.packs(layout) if backend is not None else []
        if packs and all(one.budget is None for one in packs):
            reason, backend = self._replays.too_large, None
        elif packs and self._planner.eager_is_faster(packs, layout) and self._captured.is_timed(call.statics):
            reason, backend = EAGER_IS_FASTER, None
        if backend is None:
            self.stats.count_eager(reason)
            return self._run_eager(call, layout)
        if self._checks is not None:
            replay = partial(self._replays.run, call, layout, packs, backend)
            return self._checks.run(call, packs, replay, layout)
        return self._replays.run(call, layout, packs, backend)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same call without graphs and without padding, for comparison: through the same code where it can be."""
        call = self._bind(args, kwargs)
        return self._run_eager(call, self._read_layout(call))

    @contextmanager
    def stage(self, layout: Any, /, **arguments: Any) -> Iterator[Stage]:
        """Write the rows of a call where its graph reads them, instead of copying them there.

            with encoder.stage(grid_thw) as stage:
                preprocess(images, out=stage.rows)
            features = stage.output

        The output is computed when it is first read, or at the end of the block, and is the caller's own. If an error
        ends the block before that, nothing is computed. Inside, grad mode is off and other threads wait for the pool;
        write on the stream that was current at the begin. Where calls run eager, `stage.rows` is a fresh tensor.

        Args:
            layout: What the layout argument of a call takes. A tensor on the GPU costs a sync.
            **arguments: The other arguments of a call, but the rows.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            BudgetError: No budget holds all items at once.
            InputError, LayoutError, CaptureError, StaleGraphError: As for a call.
        """
        self._replays.tell_deferred()
        packed = self.spec.packed
        if packed.padded_by is not None:
            raise InputError(
                f"{packed.name} comes as a padded batch, which is packed on its way in, so there is nothing to write in"
                " place; call the encoder with it"
            )
        if packed.name in arguments:
            raise InputError(f"{packed.name} came with a stage, which hands out the rows to write; leave it out")
        example = packed.as_argument(self._captured.no_rows())
        call = self._bind((), {**arguments, packed.name: example, self.spec.layout.name: layout})
        items = self.spec.read_layout(call.description, ())
        self._planner.whole(items)  # bounds what is allocated, with a graph or without
        reason, backend = self._choice.of(call)
        self._count(items)
        if backend is not None:
            checked = None if self._checks is None else partial(self._checks.run_stage, call, items)
            with self._replays.stage(call, items, backend, checked) as stage:
                if stage is not None:
                    yield stage
                    return
            reason = self._replays.too_large
        self.stats.count_eager(reason)
        rows = example.new_empty(self.spec.argument_shape(items, call.rows))
        call.original[packed.name], call.rows = rows, packed.rows_first(rows)
        hooked = self._state.has_hooks()
        with torch.no_grad(), staged(rows, lambda: self._without_graph(call, items, hooked)) as stage:
            yield stage

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Count the calls by their sizes, to plan budgets from them.

            with encoder.record() as trace:
                serve()
            trace.save("trace.json")

        Calls that run eager are counted, too. One whose items only the GPU has seen counts as the most that its budget
        had to hold for that: what so many rows and items may need, whatever they are.

        Raises:
            SpecError: Calls bring padded batches that stay padded, whose budgets are no matter of rows alone.
        """
        if self.spec.layout.padded:
            raise SpecError(
                "budgets of padded batches are not planned: list them as a PaddedLadder, or pack the rows, see "
                "PackedRows(padded_by=...)"
            )
        trace = Trace(self.costs)
        self._traces.append(trace)
        try:
            yield trace
        finally:
            self._traces.remove(trace)
            trace.costs = self.costs  # the first call may have measured them

    @property
    def costs(self) -> Costs:
        """What replays cost: measured after the first capture on a GPU, assumed before that."""
        return self._planner.costs

    def check(self) -> None:
        """Wait for all calls, and raise what was wrong with layouts that only the GPU has seen.

        Looks at all memory that graphs read, too, where a call looks at a part of it.

        Raises:
            LayoutError: The items of a call made no sense, did not match its rows, or broke a promise.
            StaleGraphError: Memory that graphs read is elsewhere, or read as something else than at capture. With
                `on_change="recapture"` they are released instead, and the next call captures them.
        """
        self.pool.synchronize()
        self._replays.tell_deferred()
        with self.pool.exclusive():
            self._captured.check_memory()

    def capture(self, **statics: Any) -> "GraphedEncoder":
        """Capture the graphs now, for calls with these static arguments. Does nothing where calls run eager.

        Allocates the arena and the graphs' pool. Synchronizes with the host.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            InputError: A static argument the module does not take.
            CaptureError: Something in the module cannot be captured, or the module's state is not that of construction.
        """
        self.pool.check_process()
        example = self._captured.no_rows()
        bound, beyond = self._signature.bind_statics(statics)
        reason = beyond or self._state.change(example.device.type)
        if reason:
            raise CaptureError(
                f"nothing to capture: calls run eager now ({reason}); capture in the state of construction"
            )
        backend = self._choice.backend(example.device)
        if backend:
            with self.pool.exclusive():
                self._captured.capture(Basis(bound, self.spec.row_extent.rest(example), example.device, backend))
        return self

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """Budgets, the times measured for them, replays, padding and eager runs, as a table for people.

        With a path, such as `"report.html"`, it is also written there as a page of its own, with figures.
        """
        text = report(repr(self), self._in_use, self.stats, self._captured.seconds, self._captured.kept)
        if path is not None:
            Path(path).write_text(page(repr(self), text, self.costs, self.stats), encoding="utf-8")
        return text

    def release(self) -> None:
        """Free graphs and arena, once what was queued has run: this waits for the last replay.

        The next call captures anew, with the weights as they are then. What torch keeps for cuBLAS by stream (32 MiB on
        an H200) stays.
        """
        with self.pool.exclusive():
            self._captured.release()

    def verify(self, calls: Iterable[Mapping[str, Any]], *, tolerance: float | None = None) -> Verified:
        """Prove on example calls that graphs give what the module itself gives, run eager and unpadded.

            print(encoder.verify([{"pixel_values": pixels, "grid_thw": [(1, 14, 14), (4, 8, 10)]}]))

        Every call is replayed in each budget that holds it, with NaN in the pool, the arena and all floating padding;
        again; over the rows of the largest call; with its items in another order; and with other rows. What is wrong
        is looked for without a graph, operation by operation, and named with its line.

        For tests and for the start of a service: five replays of each call in each budget, and three eager runs of it.
        Syncs, captures if nothing is captured, and has the pool's turn meanwhile. What was lent is void.

        Args:
            calls: Calls by their keyword arguments, the rows among them. They should fill each budget that matters.
            tolerance: How far outputs may be from the module's own, relative L2 of each item. By default 1e-5, of
                float16 and TF32 5e-3, of bfloat16 3e-2.

        Raises:
            VerificationError: An output is wrong, or depends on what padding holds; the message says where and why.
            InputError: A call that runs eager, or that no budget holds.
            StaleGraphError: Weights were moved or replaced since the capture: all are looked at.
        """
        pairs = [
            (self._example(arguments), self._example(with_other_rows(arguments, self.spec))) for arguments in calls
        ]
        if not pairs:
            raise InputError("there are no calls to verify: expected at least one, as a dict of its arguments")
        given = self._tolerance if tolerance is None else tolerance
        return Verifier(self._captured, self._forward, self._planner, self.pool, given, pairs).verify()

    def _example(self, arguments: Mapping[str, Any]) -> Example:
        call = self._bind((), dict(arguments))
        reason, backend = self._choice.of(call)
        if backend is None:
            raise InputError(f"there is nothing to verify: calls run eager now ({reason})")
        return Example(call, self._read_layout(call), backend)

    def poison(self) -> None:
        """Fill the arena's floating rows and the pool, outputs included, with NaN, as tests do between replays.

        Padding rows keep the NaN until a replay writes them; no active row may change because of it.
        """
        with self.pool.exclusive():
            self._captured.poison()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._signature.bind(args, kwargs)
        self._captured.check_rows(call.rows)
        if self._off is not None and call.beyond is None:
            call.beyond = self._off(self.module)
        return call

    def _read_layout(self, call: Call) -> Layout:
        """The items of a call; where it brings a padded batch to pack, this packs it."""
        layout = self.spec.read_layout(call.description, call.rows.shape)
        if self.spec.packed.padded_by is not None:
            call.length = call.rows.shape[1]
            with torch.no_grad():
                call.rows = pack_rows(call.rows, layout.rows)
        return layout

    def _count(self, layout: Layout) -> None:
        self.stats.count_call(len(layout))
        for trace in self._traces:
            trace.count(self.spec.needs.load(layout), self.spec.needs.squares(layout))

    def _run_eager(self, call: Call, layout: Layout) -> Any:
        output = self._without_graph(call, layout, self._state.has_hooks())
        return Borrowed(output) if self._lends else output

    def _without_graph(self, call: Call, layout: Layout, hooked: bool) -> Any:
        if self._checks is not None and self._checks.distrusts_forward:
            return self._forward.reference(call, layout)
        return self._forward.without_graph(call, layout, hooked)

    def __repr__(self) -> str:
        name, rows = type(self.module).__name__, f"{self.budgets[0].rows}..{self.budgets[-1].rows} rows"
        return f"GraphedEncoder({name}, {len(self.budgets)} budgets of {rows}, {len(self._captured)} captured)"


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
