"""`GraphedEncoder`: any variable-length encoder, run as CUDA graphs."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from varlen_graphs.attention import timing
from varlen_graphs.capture.choice import Choice
from varlen_graphs.capture.choose import BackendName
from varlen_graphs.capture.options import Capture
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.state import State
from varlen_graphs.errors import BudgetError, CaptureError, InputError, SpecError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import Basis, Captured, NoBudgetError
from varlen_graphs.layout.budgets import Budget, Budgets, Ladder, resolve_budgets
from varlen_graphs.layout.memory_size import in_bytes
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.in_use import InUse
from varlen_graphs.routing.limit import Limit
from varlen_graphs.routing.planner import Planner
from varlen_graphs.routing.recent import share_of_each
from varlen_graphs.serving.background import Background
from varlen_graphs.serving.calls import Calls
from varlen_graphs.serving.html import page
from varlen_graphs.serving.lazy import Wanted
from varlen_graphs.serving.replay import Replays
from varlen_graphs.serving.report import report
from varlen_graphs.serving.staging import Stage
from varlen_graphs.serving.warmup_file import Warmup, identity_of
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import statics_of
from varlen_graphs.spec.signature import Signature
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.trace import Trace
from varlen_graphs.verify.examples import VerificationCall, with_other_rows
from varlen_graphs.verify.in_service import InService
from varlen_graphs.verify.options import Verify, check_tolerance
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
        lazy: Whether no call captures. What calls want is captured between them, by `capture_wanted` or
            `capture_in_background`; until then they take other budgets where that is no slower than eager, or run
            eager, which `stats.eager` counts as `"not captured yet"`.
        memory: What graphs, arena and pool may hold: bytes, or a text such as `"2GiB"`. After each capture that holds
            more, the budgets that are of the least use for the memory they take are out of use until `release`; with
            `lazy=True` those below the largest come back when calls want them more than others. While graphs are
            captured there may be more. Of a shared pool all counts.
        warmup: A file that `save_warmup` wrote, or is to write at the end of this run: with it nothing is measured that
            was, and with `lazy=True` the budgets that calls used then are wanted from the start. One of another device,
            version, module or declaration is ignored, with a warning.

    Attributes:
        module: As given.
        spec: As given.
        pool: The pool.
        stats: What happened so far.

    Raises:
        SpecError: The declaration does not match the module, or an option is none of those above.
        BudgetError: A budget that no item could use, or `memory` that is no amount of it.
        InputError: `warmup` is a file of something else, or damaged.
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
        off: Callable[[nn.Module], str | None] | None = None,
        memory: int | str | None = None,
        capture: Capture = Capture(),  # noqa: B008 - frozen
        verify: int | Verify = 0,
    ) -> None:
        if not isinstance(module, nn.Module) or not isinstance(buffer_spec, BufferSpec):
            raise SpecError(
                f"an encoder was to be made of a {type(module).__name__}, declared by a {type(buffer_spec).__name__}: "
                "expected a torch.nn.Module, and a BufferSpec"
            )
        _check_choice("backend", backend, get_args(BackendName))
        _check_choice("on_miss", on_miss, ("eager", "error"))
        verify = verify if isinstance(verify, Verify) else Verify(verify)
        if not isinstance(capture, Capture):
            raise SpecError(f"capture={capture!r}: expected a Capture, such as vg.Capture(lazy=True)")
        lazy, compile, on_change, warmup = capture.lazy, capture.compile, capture.on_change, capture.warmup
        _check_choice("outputs", outputs, ("owned", "borrowed"))
        self.module = module
        self.spec = buffer_spec
        resolved = resolve_budgets(budgets, buffer_spec.row_multiple)
        buffer_spec.check_budgets(resolved)
        if memory is None and isinstance(budgets, Ladder):
            memory = budgets.memory
        self.pool = pool or Pool()
        self.stats = Stats()
        self._lends = outputs == "borrowed"
        self._in_use = InUse(Costs.in_rows(resolved), settled=not lazy)
        self._planner = Planner(buffer_spec, self._in_use, on_miss, min_segment_rows)
        self._signature = Signature(module, forward, buffer_spec)
        self._forward = Forward(module, forward, buffer_spec, self._signature, compile)
        self._state = State(module)
        limit = None if memory is None else Limit(in_bytes(memory), self._in_use, self.stats)
        self._captured = Captured(
            module, buffer_spec, self._forward, self._state, self.pool, self._in_use, on_change, lazy, limit
        )
        self._replays = Replays(self._captured, self._planner, self._forward, self.pool, self.stats, self._lends)
        self._tolerance = verify.tolerance
        checks = None
        if verify.calls:
            checks = InService(verify, self._captured, self._forward, self._planner, self.pool, self.stats)
        self._identity = partial(
            identity_of, module, buffer_spec, self._forward.device, compile, getattr(forward, "__qualname__", None)
        )
        self._used: list[tuple[dict[str, Any], dict[Budget, float]]] = []
        if warmup is not None and (known := Warmup.load(warmup, self._identity())) is not None:
            self._learn(known)
        self._wanted = Wanted(self._captured, self._planner, self.pool, self.stats) if lazy else None
        self._calls = Calls(
            self._signature, Choice(module, self._state, backend, self.pool), self._captured, self._planner,
            self._forward, self._replays, self._state, self.stats, checks, self._wanted, off, self._lends,
        )  # fmt: skip
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
        return self._calls.answer(self._calls.bind(args, kwargs))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same call without graphs and without padding, for comparison: through the same code where it can be."""
        return self._calls.eager(self._calls.bind(args, kwargs))

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
        with self._calls.stage(layout, arguments) as stage:
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
        # What was measured, of budgets that are out of use as well: a plan is for any.
        trace = Trace(lambda: self._in_use.learned or self.costs)
        self._calls.traces.append(trace)
        try:
            yield trace
        finally:
            self._calls.traces.remove(trace)
            trace.costs = trace.costs  # as they are now, whatever the encoder measures later

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets, ascending."""
        return self._in_use.budgets

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
        """Capture the graphs now, for calls with these static arguments.

        Does nothing where calls run eager, as they do where no graph fits `memory`.

        Allocates the arena and the graphs' pool. Synchronizes with the host.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            InputError: A static argument the module does not take.
            CaptureError: Something in the module cannot be captured, or the module's state is not that of construction.
        """
        self.pool.check_process()
        basis = self._basis(statics)
        if basis is not None:
            with self.pool.exclusive():
                if self._in_use.why_none is None:
                    self._captured.capture(basis)
        return self

    def _basis(self, statics: dict[str, Any]) -> Basis | None:
        """What to capture for calls with these static arguments; `None` where calls run eager."""
        example = self._captured.no_rows()
        bound, beyond = self._signature.bind_statics(statics)
        reason = beyond or self._state.change(example.device.type)
        if reason:
            raise CaptureError(
                f"nothing to capture: calls run eager now ({reason}); capture in the state of construction"
            )
        backend = self._calls.choice.backend(example.device)
        if backend is None:
            return None
        return Basis(bound, tuple(self.spec.row_extent.rest(example)), example.device, backend)

    def capture_wanted(self, most: int | None = 1) -> list[Budget]:
        """Capture what calls wanted and found without a graph, with `lazy=True`: the most wanted first.

        For the time between calls: the pool's turn is taken for one budget at a time. With the first one the largest
        budget is captured, too, because it sizes the memory that all share.

        Args:
            most: At most so many; `None` is all.

        Returns:
            Those that were captured, or went out of use because they could not be.

        Raises:
            SpecError: The encoder is not lazy, so its calls capture.
            CaptureError, StaleGraphError, and what the module raises: As for `capture`. Calls go on eager.
        """
        self.pool.check_process()
        return self._lazy().capture(most)

    def capture_in_background(self) -> "Future[None]":
        """Capture what calls want in a thread of its own, with `lazy=True`, one budget after the other.

        Calls meanwhile do not wait, unless they began before the capture: they run eager while a graph is captured, and
        on the graphs there are in between.

        Returns:
            A future that is pending as long as the thread is at work: the same for all that ask meanwhile. `cancel()`
            ends it, and so do the end of the encoder and that of the interpreter. An error ends it too, and is the
            future's `exception()`.

        Raises:
            SpecError: The encoder is not lazy.
        """
        self.pool.check_process()
        return Background.of(self._lazy(), self.pool).future

    def add_budget(self, budget: int | Budget) -> Budget:
        """Have one budget more, while serving; from any thread.

        It is captured now, or when calls want it with `lazy=True`. Where it needs more room for rows or items than the
        arena has, which is made for the largest budget, all graphs are captured again, in an arena that is larger:
        calls meanwhile wait, or run eager with `lazy=True`. With `memory` it may be the one that is given up at once.

        Args:
            budget: Rows, or a `Budget`.

        Returns:
            The budget, its rows rounded up as those of the others.

        Raises:
            BudgetError: It is there already, or no item could use it.
            SpecError: Ranks share the module, as in a `TensorParallelEncoder`.
            CaptureError, StaleGraphError, and what the module raises: As for `capture`; the budget stays.
        """
        self.pool.check_process()
        (one,) = resolve_budgets(budget, self.spec.row_multiple)
        self.spec.check_budgets([one])
        with self.pool.exclusive():
            if one in self.budgets:
                raise BudgetError(f"{one} is one of the encoder's budgets already{self._in_use.why_out(one)}")
            self._captured.add(one)
        return one

    def drop_budget(self, budget: int | Budget) -> None:
        """Have one budget less, while serving; from any thread. Its calls go to others, or run eager.

        Waits for the last replay, and frees what its graph alone takes. Memory that graphs share stays as large as the
        largest budget needed until `release`.

        Args:
            budget: Rows, or a `Budget`, as `add_budget` takes it.

        Raises:
            BudgetError: There is no such budget, or no other one.
            SpecError: Ranks share the module, as in a `TensorParallelEncoder`.
        """
        self.pool.check_process()
        (one,) = resolve_budgets(budget, self.spec.row_multiple)
        with self.pool.exclusive():
            if one not in self.budgets:
                raise BudgetError(f"{one} is none of the encoder's budgets: expected one of encoder.budgets")
            if len(self.budgets) == 1:
                raise BudgetError(f"{one} is the only budget: add another one first")
            self._captured.drop(one)

    def save_warmup(self, path: str | os.PathLike[str]) -> None:
        """Write what this start measured, and which budgets calls used, for the next: `GraphedEncoder(warmup=path)`.

        Which they used is known for each set of static arguments that JSON holds: numbers, texts, booleans and `None`.
        Others are left out. What the kernels are compiled to, Triton and torch's compiler keep in files of their own.
        """
        device, costs = self._forward.device, self._in_use.learned
        costs = costs if costs is not None and costs.measured else None
        timed = timing.as_json(device) if device is not None else []
        used = [(statics_of(key), dict(replays)) for key, replays in [*self._replays.used.items()]]
        Warmup(self._identity(), costs, used, timed).save(path)

    def _learn(self, known: Warmup) -> None:
        """Take in what an earlier start measured."""
        if known.costs is not None and (timed := known.costs.replays.keys() & {*self.budgets}):
            self._in_use.known = frozenset(timed)
            self._in_use.learn(known.costs)
        if self._forward.device is not None:
            timing.learn(known.attention, self._forward.device)
        each = share_of_each(sum(sum(calls.values()) for _, calls in known.used))
        self._used = [(statics, {budget: n * each for budget, n in calls.items()}) for statics, calls in known.used]

    def _lazy(self) -> Wanted:
        if self._wanted is None:
            raise SpecError("calls of this encoder capture what they need: expected one with lazy=True")
        used, self._used = self._used, []
        for statics, calls in used:
            try:
                basis = self._basis(statics)
            except InputError:  # the module does not take these any more
                continue
            except (SpecError, CaptureError):  # the shape of rows is not known, or graphs are off: calls tell
                self._used.append((statics, calls))
                continue
            if basis is not None:
                self._wanted.want(basis, calls)
        return self._wanted

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """Budgets, the times measured for them, replays, padding and eager runs, as a table for people.

        With a path, such as `"report.html"`, it is also written there as a page of its own, with figures.
        """
        captured = self._captured
        seconds, kept, failure = captured.seconds, captured.kept, captured.failure
        text = report(repr(self), self._in_use, self.stats, seconds, kept, failure, captured.lazy)
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
        check_tolerance(tolerance)
        if isinstance(calls, Mapping):
            raise InputError(f"verify came with one call, of {', '.join(map(repr, calls))}: expected a list of calls")
        calls = [*calls]
        if odd := [type(call).__name__ for call in calls if not isinstance(call, Mapping)]:
            raise InputError(f"verify came with a {odd[0]} as a call: expected a dict of its arguments by name")
        pairs = [
            (self._example(arguments), self._example(with_other_rows(arguments, self.spec))) for arguments in calls
        ]
        for one, _ in pairs:  # first, because a limit of memory may leave fewer budgets
            with self.pool.exclusive(), suppress(NoBudgetError):  # of which the calls are told below
                self._captured.capture(self._captured.basis(one.call, one.backend))
        if not pairs:
            raise InputError("there are no calls to verify: expected at least one, as a dict of its arguments")
        given = self._tolerance if tolerance is None else tolerance
        return Verifier(self._captured, self._forward, self._planner, self.pool, given, pairs).verify()

    def _example(self, arguments: Mapping[str, Any]) -> VerificationCall:
        call = self._calls.bind((), dict(arguments))
        reason, backend = self._calls.choice.of(call)
        if backend is None:
            raise InputError(f"there is nothing to verify: calls run eager now ({reason})")
        return VerificationCall(call, self._calls.read_layout(call), backend)

    def bytes(self) -> int:
        """What graphs, arena and pool hold; of a shared pool all of it. On the tape graphs share no memory."""
        with self.pool.exclusive():
            return self._captured.bytes()

    def poison(self) -> None:
        """Fill the arena's floating rows and the pool, outputs included, with NaN, as tests do between replays.

        Padding rows keep the NaN until a replay writes them; no active row may change because of it.
        """
        with self.pool.exclusive():
            self._captured.poison()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GraphedEncoder is neither copied nor pickled, because its graphs belong to this process: copy its "
            "module, and make an encoder of the copy"
        )

    def __repr__(self) -> str:
        budgets = self.budgets
        name, rows = type(self.module).__name__, f"{budgets[0].rows}..{budgets[-1].rows} rows"
        return f"GraphedEncoder({name}, {len(budgets)} budgets of {rows}, {len(self._captured)} captured)"


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
