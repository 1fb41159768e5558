"""`GraphedEncoder`: any variable-length encoder, run as CUDA graphs."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from torch import nn

from varlen_graphs.capture.mode import BackendName, Mode
from varlen_graphs.capture.options import Capture
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.torch_modes import active_mode, watcher
from varlen_graphs.errors import InputError, SpecError, counted
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.kernels.start import start_triton
from varlen_graphs.layout.budgets import Budgets, DefaultBudgets, Ladder, resolve_budgets
from varlen_graphs.layout.options import GpuLayouts, LayoutCheck
from varlen_graphs.layout.values import quoted
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.memory_limit import MemoryLimit
from varlen_graphs.routing.router import Router
from varlen_graphs.serving.execute import Executor
from varlen_graphs.serving.lazy import LazyRouter
from varlen_graphs.serving.operate import OperatedEncoder
from varlen_graphs.serving.staging import Stage, stage
from varlen_graphs.serving.wanted import Wanted
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.checks import check_budgets
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.spec.signature import Off, Signature
from varlen_graphs.stats import Stats
from varlen_graphs.verify.claim import check_claim
from varlen_graphs.verify.examples import with_other_rows
from varlen_graphs.verify.in_service import VerifyingExecutor
from varlen_graphs.verify.options import Verify, check_tolerance
from varlen_graphs.verify.proof import Prover
from varlen_graphs.verify.verifier import Verified, Verifier


class GraphedEncoder(OperatedEncoder):
    """Runs a variable-length encoder as a handful of CUDA graphs.

    A call takes the module's own arguments, without the declared buffers, and returns the module's own output type: a
    fresh object whose tensors belong to the caller, with the active rows only, and without grad. The items of the call
    are packed into budgets; each budget's graph computes the buffers from the items and runs the module. Items that no
    budget holds run eager through the same code.

    In grad mode, calls of a module in training mode with a trainable parameter, and calls whose rows require grad, run
    the original with its gradients.

    A call captures the graph that it needs, and the first one that of the largest budget too; `capture()` captures all.
    A replay does not sync with the host. Weights may be updated in place. Moving, casting or reloading the module
    raises `StaleGraphError` at the next call; replacing a single one of hundreds of weights does within 64 calls, and
    at `check()`. Calls from several threads take turns.

    A budget whose graph cannot be captured is disabled, with a warning: its calls use larger budgets or several smaller
    ones, and what no enabled budget holds runs eager. If none can be captured, the error is raised.

    Items described on the GPU (integers `[items, 3]`, or lengths `[items]`, columns too) are not copied to the host if
    one budget holds so many rows and items whatever they are. The GPU validates them: if they are wrong, the floating
    outputs of the call are NaN, the log and `stats.wrong_layouts` tell, and `check()` raises `LayoutError`. Otherwise,
    with host buffers, and for padded batches, a call costs one copy to the host.

    An encoder is an `nn.Module` with the parts and attributes of the module it runs: `model.visual = encoder` leaves
    the names in the model's state dict unchanged.

    Args:
        module: The encoder, on its device and in its dtype.
        budgets: Row counts, `Budget`s, or a `Ladder`; for padded batches `Budget.padded(...)`s or a `PaddedLadder`.
            `None` is a default of these, of which the first capture leaves out what takes too much memory or time.
        buffer_spec: Declaration of the module's arguments and outputs.
        forward: Function that runs in place of the module, called as `forward(module, **arguments)`. It computes the
            same outputs from other arguments: what differs from the module's own raises, see `Verify.mismatch`.
        method: Name of the method that is meant where that is not `forward`: `"forward_features"`, `"encode_image"`. A
            call has its arguments; graphs hold it, or the function in its place, and are proven against it.
        backend: `"cuda"`; `"tape"`, which replays on the CPU what a graph would (for tests without a GPU); `"eager"`,
            which captures nothing; or `"auto"`: `"cuda"` for a module on a CUDA device, `"eager"` elsewhere, with one
            warning.
        pool: A pool to share with other encoders.
        on_miss: `"eager"` runs items that no budget holds eager; `"error"` raises `BudgetError`.
        layouts: `"reported"`: wrong layouts on the GPU are reported as above, and no other call is harmed. `"checked"`:
            such calls wait for the GPU, and raise `LayoutError` themselves. A `GpuLayouts` has more options.
        off: Called with the module at each call; returns the reason why the call must run eager, or `None`. For what
            changes the number of outputs by their content, such as pruning of video tokens. The reason is counted in
            `stats.eager`.
        memory: Limit on what graphs, arena and pool hold: bytes, or a text such as `"2GiB"`. After a capture that
            exceeds it, the least useful budgets are disabled until `release`; with `Capture(lazy=True)` those below
            the largest one come back when calls request them more than others. A capture in progress may exceed it. A
            shared pool counts in full.
        capture: Options of captures: lazy, compiled, what to do when memory changes, warm-up files.
        verify: Number of first calls of each budget to compare with the module itself, or a `Verify` with more options,
            among them those of the proof of new graphs.

    Attributes:
        module: As given.
        spec: As given.
        pool: The pool.
        stats: Counters of calls, replays and eager runs.
        executor: The path of a call, for encoders that are built on this one.

    Raises:
        SpecError: The declaration does not match the module, or an option has a wrong value.
        BudgetError: A budget that no item could use, or `memory` is not an amount of memory.
        InputError: The warm-up file is damaged, or of something else, with `Capture(on_bad_warmup="error")`.
    """

    def __init__(
        self,
        module: nn.Module,
        budgets: Budgets | None,
        buffer_spec: BufferSpec,
        *,
        forward: Callable[..., Any] | None = None,
        method: str = "forward",
        backend: BackendName = "auto",
        pool: Pool | None = None,
        on_miss: Literal["eager", "error"] = "eager",
        layouts: LayoutCheck | GpuLayouts = "reported",
        off: Off | None = None,
        memory: int | str | None = None,
        capture: Capture = Capture(),  # noqa: B008 - frozen
        verify: int | Verify = 0,
    ) -> None:
        if not isinstance(module, nn.Module) or not isinstance(buffer_spec, BufferSpec):
            raise SpecError(
                f"GraphedEncoder got a {type(module).__name__} as module and a {type(buffer_spec).__name__} as "
                "buffer_spec: expected a torch.nn.Module and a BufferSpec"
            )
        _check_choice("backend", backend, get_args(BackendName))
        _check_choice("on_miss", on_miss, ("eager", "error"))
        for name, function in (("forward", forward), ("off", off)):
            if function is not None and not callable(function):
                raise SpecError(f"{name}={quoted(function)}: expected a function, or None")
        if not callable(getattr(module, method, None) if isinstance(method, str) else None):
            raise SpecError(
                f"method={quoted(method)}: expected the name of a method of {type(module).__name__}, such as "
                "'forward_features'"
            )
        if pool is not None and not isinstance(pool, Pool):
            raise SpecError(f"pool={quoted(pool)}: expected a Pool, such as vg.Pool(), or None")
        if not isinstance(capture, Capture):
            raise SpecError(f"capture={capture!r}: expected a Capture, such as vg.Capture(lazy=True)")
        verify = verify if isinstance(verify, Verify) else Verify(verify)
        chosen = DefaultBudgets.of(buffer_spec.layout) if budgets is None else budgets
        budgets = chosen.budgets if isinstance(chosen, DefaultBudgets) else chosen
        resolved = resolve_budgets(budgets, buffer_spec.row_multiple, buffer_spec.needs)
        check_budgets(buffer_spec, resolved)
        if memory is None and isinstance(budgets, Ladder):
            memory = budgets.memory
        defaults = resolved if isinstance(chosen, DefaultBudgets) else ()
        pool, stats = Pool() if pool is None else pool, Stats()
        enabled = EnabledBudgets(Costs.in_rows(resolved), defaults)
        signature = Signature(module, forward, buffer_spec, off, method)
        limit = None if memory is None else MemoryLimit(memory, enabled, stats)
        start_triton(module.parameters())
        runs = Forward(module, forward, buffer_spec, signature, capture.compile, method)
        mode = Mode(module, backend, pool, runs.beside)
        store = GraphStore(runs, mode, pool, enabled, limit, capture)
        layouts = layouts if isinstance(layouts, GpuLayouts) else GpuLayouts(layouts)
        routes = buffer_spec, enabled, on_miss, layouts.min_segment_rows
        wanted = Wanted(store, stats, capture)
        router = Router(*routes) if wanted.requests is None else LazyRouter(*routes, wanted.requests)
        parts = signature, mode, router, store, stats
        executor = (
            VerifyingExecutor(*parts, layouts=layouts, options=verify)
            if verify.calls
            else Executor(*parts, layouts=layouts)
        )
        executor.exact = wanted.exact
        identity = capture.compile, method, getattr(forward, "__qualname__", None)
        super().__init__(module, executor, wanted, identity, capture)
        self._tolerance = verify.tolerance
        if verify.prove:
            runs.proven = {}
            if forward is not None and verify.mismatch == "error":
                runs.check_claim = partial(check_claim, runs, verify.tolerance)
            store.capturer.prove = Prover(runs, mode, pool, enabled, verify)
        self._warm_start.load()
        weakref.finalize(self, pool.synchronize).atexit = False  # no memory goes while a replay may read it

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call: see `forward`. Runs hooks on the encoder itself, if there are any."""
        if self._forward_hooks or self._forward_pre_hooks or self.executor.forward.is_running:
            return super().__call__(*args, **kwargs)
        self.executor.begin()  # as `forward`, a frame less
        if (by := watcher(args, kwargs)) is not None:
            return self.executor.watched(by, args, kwargs)
        return self.executor.answer(self.executor.bind(args, kwargs))

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call.

        Returns:
            The module's output.

        Raises:
            InputError: An argument is missing, unknown, undeclared, or on the wrong device.
            LayoutError: Impossible items, or items that do not match the rows; if only the GPU has seen them, with
                `layouts="checked"` alone.
            BudgetError: An item that fits no budget, with `on_miss="error"`.
            CaptureError: The module cannot be captured; raised by the first call.
            StaleGraphError: Weights, or other memory that graphs read, were moved or replaced since the capture, or the
                process was forked.
        """
        if self.executor.forward.is_running:  # the function called the module in whose place the encoder is
            return self.executor.forward.module_forward(*args, **kwargs)
        self.executor.begin()
        if (by := watcher(args, kwargs)) is not None:
            return self.executor.watched(by, args, kwargs)
        return self.executor.answer(self.executor.bind(args, kwargs))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call eager and without padding, for comparison: through the same code where possible. Not counted."""
        return self.executor.run_eager(self.executor.bind(args, kwargs))

    @contextmanager
    def stage(self, layout: Any, /, **arguments: Any) -> Iterator[Stage]:
        """Write the rows of a call where its graph reads them, instead of copying them there.

            with encoder.stage(grid_thw) as stage:
                preprocess(images, out=stage.rows)
            features = stage.output

        The output is computed when it is first read, or at the end of the block, and belongs to the caller. If an error
        ends the block before that, nothing is computed. Inside, grad mode is off and other threads wait for the pool;
        write on the stream that was current at the beginning; the output may be read first on another one. If the call
        runs eager, `stage.rows` is a fresh tensor.

        Args:
            layout: Value of the layout argument. A tensor on the GPU costs a sync.
            **arguments: The other arguments of a call, without the rows.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            BudgetError: No budget holds all items at once.
            InputError, LayoutError, CaptureError, StaleGraphError: As for a call.
        """
        self.executor.begin()
        with stage(self.executor, layout, arguments) as staged:
            yield staged

    def verify(self, calls: Iterable[Mapping[str, Any]], *, tolerance: float | None = None) -> Verified:
        """Prove on example calls that graphs return what the module itself returns, run eager and unpadded.

            print(encoder.verify([{"pixel_values": pixels, "grid_thw": [(1, 14, 14), (4, 8, 10)]}]))

        Every call is replayed in each budget that holds it, with NaN in the pool, the arena and all floating padding;
        again; over the rows of the largest call; with its items in another order; and with other rows. The cause of an
        error is located by running eager, operation by operation, and named with its line.

        For tests and for the start of a service: five replays of each call in each budget, and three eager runs of it.
        Syncs, captures if nothing is captured, and keeps the pool's turn meanwhile.

        Args:
            calls: Calls by their keyword arguments, the rows among them. They should fill each budget that matters.
            tolerance: Largest error of outputs, relative L2 of each item. By default 1e-5, 5e-3 for float16 and TF32,
                3e-2 for bfloat16.

        Raises:
            VerificationError: An output is wrong, or depends on padding; the message says where and why.
            InputError: A call that runs eager, or that no budget holds.
            StaleGraphError: Weights were moved or replaced since the capture: all are checked.
        """
        check_tolerance(tolerance)
        if isinstance(calls, Mapping):
            raise InputError(f"verify came with one call, of {', '.join(map(repr, calls))}: expected a list of calls")
        if not isinstance(calls, Iterable):
            raise InputError(f"verify came with {quoted(calls)}: expected a list of calls")
        calls = [*calls]
        if odd := [type(call).__name__ for call in calls if not isinstance(call, Mapping)]:
            raise InputError(f"verify came with a {odd[0]} as a call: expected a dict of its arguments by name")
        store, example = self.executor.store, self._example
        pairs = [(example(arguments), example(with_other_rows(arguments, self.spec))) for arguments in calls]
        for one, _ in pairs:  # first, because a memory limit may leave fewer budgets
            with self.pool.exclusive(), self.pool.order:
                if self._budgets.enabled:
                    store.capture(store.inputs(one))
        if not pairs:
            raise InputError("there are no calls to verify: expected at least one, as a dict of its arguments")
        given = self._tolerance if tolerance is None else tolerance
        return Verifier(self.executor, given, pairs).verify()

    def _example(self, arguments: Mapping[str, Any]) -> Call:
        """Bind a call to verify."""
        call = self.executor.bind((), dict(arguments))
        self.executor.mode.look_again()
        if reason := call.beyond or active_mode() or self.executor.mode.why_eager(call.rows.device):
            raise InputError(f"there is nothing to verify: calls run eager now ({reason})")
        read_layout(self.spec, call)
        return call

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GraphedEncoder is neither copied nor pickled, because its graphs belong to this process: copy its "
            "module, and make an encoder of the copy"
        )

    def __repr__(self) -> str:
        budgets = self.budgets
        name, rows = type(self.module).__name__, f"{budgets[0].rows}..{budgets[-1].rows} rows"
        return (
            f"GraphedEncoder({name}, {counted(len(budgets), 'budget')} of {rows}, {len(self.executor.store)} captured)"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(f"{name}={quoted(value)}: expected one of {', '.join(map(repr, allowed))}")
