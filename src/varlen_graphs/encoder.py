"""`GraphedEncoder`: any variable-length encoder, run as CUDA graphs."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.calls.assemble import assemble, check_options
from varlen_graphs.calls.background import Background
from varlen_graphs.calls.capture_queue import CaptureQueue
from varlen_graphs.calls.gauges import bytes_of, gauges
from varlen_graphs.calls.html import Section, page
from varlen_graphs.calls.report import report
from varlen_graphs.calls.staging import Stage, stage
from varlen_graphs.calls.warmup_file import WarmupSection, write_sections
from varlen_graphs.capture.mode import BackendName
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.capture.pool import Pool
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.budgets import resolve_budgets
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.checks import check_budgets
from varlen_graphs.declaration.image_processor import read_images
from varlen_graphs.declaration.signature import EagerIf
from varlen_graphs.errors import BudgetError, InputError, SpecError, counted
from varlen_graphs.options.capture import Capture
from varlen_graphs.options.gpu_layouts import GpuLayouts, LayoutCheck
from varlen_graphs.options.verify import Verify
from varlen_graphs.prometheus import Metric
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.router import OnMiss
from varlen_graphs.shadows.constants import NotCopied
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.trace import Trace
from varlen_graphs.verify.given_calls import Verified, verify_calls

Self = TypeVar("Self", bound="GraphedEncoder")


def _of_module(name: str) -> Any:
    """Return a property for an attribute of the module; `nn.Module.__init__`, which sets it, changes nothing."""
    return property(lambda self: getattr(self.module, name), lambda self, value: None)


class GraphedEncoder(nn.Module, NotCopied):
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

    An encoder is an `nn.Module` with the parts, weights and attributes of the module it runs, and none of its own:
    `model.visual = encoder` leaves the names in the model's state dict unchanged. In a model that has the module as
    well, the weights have both names in the state dict, as those of any part with two names; keep such an encoder in a
    list, which registers nothing.

    Args:
        module: The encoder, on its device and in its dtype.
        budgets: Row counts, `Budget`s, or a `Ladder`; for padded batches `Budget.padded(...)`s or a `PaddedLadder`.
            `None` is a default of these, of which the first capture leaves out what takes too much memory or time.
        buffer_spec: Declaration of the module's arguments and outputs.
        forward: Function that runs in place of the module, called as `forward(module, **arguments)`. It computes the
            same outputs from other arguments: what differs from the module's own raises, see `BufferSpec.declared_by`.
        method: Name of the method that is meant where that is not `forward`: `"forward_features"`, `"encode_image"`. A
            call has its arguments; graphs hold it, or the function in its place, and are verified against it.
        backend: `"cuda"`; `"tape"`, which replays on the CPU what a graph would (for tests without a GPU); `"eager"`,
            which captures nothing; or `"auto"`: `"cuda"` for a module on a CUDA device, `"eager"` elsewhere, with one
            warning.
        pool: A pool to share with other encoders.
        on_miss: `"eager"` runs items that no budget holds eager; `"error"` raises `BudgetError`.
        layouts: `"reported"`: wrong layouts on the GPU are reported as above, and no other call is harmed. `"checked"`:
            such calls wait for the GPU, and raise `LayoutError` themselves. A `GpuLayouts` has more options.
        eager_if: Called with the module at each call; returns the reason why the call must run eager, or `None`. For
            what changes the number of outputs by their content, such as pruning of video tokens. The reason is counted
            in `stats.eager`.
        memory: Limit on what graphs, arena and pool hold: bytes, or a text such as `"2GiB"`. After a capture that
            exceeds it, the least useful budgets are disabled until `release`; with `Capture(lazy=True)` those below
            the largest one come back when calls request them more than others. A capture in progress may exceed it. A
            shared pool counts in full.
        capture: Options of captures: lazy, compiled, what to do when memory changes, warm-up files.
        verify: Number of first calls of each budget to compare with the module itself, or a `Verify` with more options,
            among them those of the check of new graphs.

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

    module: nn.Module

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
        on_miss: OnMiss = "eager",
        layouts: LayoutCheck | GpuLayouts = "reported",
        eager_if: EagerIf | None = None,
        memory: int | str | None = None,
        capture: Capture = Capture(),  # noqa: B008 - frozen
        verify: int | Verify = 0,
    ) -> None:
        check_options(module, buffer_spec, forward, method, backend, pool, on_miss, eager_if, capture)
        verify = verify if isinstance(verify, Verify) else Verify(verify)
        super().__init__()
        object.__setattr__(self, "module", module)  # not registered: its parts are found through the properties below
        self.executor, self._queue, self._warm_start = assemble(
            module, budgets, buffer_spec, forward=forward, method=method, backend=backend, pool=pool, on_miss=on_miss,
            layouts=layouts, eager_if=eager_if, memory=memory, capture=capture, verify=verify,
        )  # fmt: skip
        self.spec: BufferSpec = self.executor.spec
        self.pool: Pool = self.executor.pool
        self.stats: Stats = self.executor.stats
        self._budgets = self.executor.store.budgets
        self._tolerance = verify.tolerance
        weakref.finalize(self, self.pool.synchronize).atexit = False  # no memory goes while a replay may read it

    # Calls

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
        if self.executor.forward.is_running:  # by way of the module in whose place the encoder is
            return self.executor.forward.module_forward(*args, **kwargs)
        return self.executor.call(args, kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call eager and without padding, for comparison: through the same code where possible. Not counted."""
        executor = self.executor
        return executor.run_eager(executor.bind(args, kwargs), executor.mode.eager_reason(args, kwargs))

    def stage(self, layout: Any, /, **arguments: Any) -> AbstractContextManager[Stage]:
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
            SpecError: The shape of a row is not known yet: give `vg.inputs.Rows(shape=...)`, or make a call first.
            BudgetError: No budget holds all items at once.
            InputError, LayoutError, CaptureError, StaleGraphError: As for a call.
        """
        return stage(self.executor, layout, arguments)

    def read_images(self, images: Any, device: str | torch.device | None = None) -> dict[str, Any]:
        """Resize decoded images as the processor of `normalize=vg.inputs.Normalize.of(processor)`, or `Patches.of`.

        Returns the arguments of a call, so that another thread may do it than the one that calls.

        Args:
            images: One image or a batch that the processor takes: pictures of PIL, arrays or tensors of bytes.
            device: Where the rows of bytes are to be. On a GPU, `Patches` copies the bytes of the images there and
                resizes them in two launches each, bit for bit as the processor does on the host, if that does it as
                Pillow or torch does, which the first image tries. Otherwise, and by default, the host resizes.

        Raises:
            InputError: The declaration has no processor, or there is no image, or one that cannot be used.
        """
        place = None if device is None else torch.device(device)
        return read_images(self.spec, images, self.executor.signature.names, place)

    def from_images(self, images: Any) -> Any:
        """Encode decoded images: they are resized on the GPU of the module, see `read_images`, and graphs do the rest.

        Syncs with the device if the images are elsewhere.
        """
        device = self.executor.forward.device
        return self(**self.read_images(images, device if device is not None and device.type == "cuda" else None))

    # Checks and records

    def verify(self, calls: Iterable[Mapping[str, Any]], *, tolerance: float | None = None) -> Verified:
        """Verify on example calls that graphs return what the module itself returns, run eager and unpadded.

            print(encoder.verify([{"pixel_values": pixels, "grid_thw": [(1, 14, 14), (4, 8, 10)]}]))

        Every call is replayed in each budget that holds it, with NaN in the pool, the arena and all floating padding;
        over the rows of the largest call; with its items in another order; and with other rows, twice as well. The
        cause of an error is located by running eager, operation by operation, and named with its line.

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
        return verify_calls(self.executor, calls, self._tolerance if tolerance is None else tolerance)

    def check(self) -> None:
        """Wait for all calls, and raise what was wrong with layouts that only the GPU has seen.

        Checks all memory that graphs read, and what the module and its parts hold otherwise, of which a call checks a
        part.

        Raises:
            LayoutError: The items of a call were impossible, did not match its rows, or broke a promise.
            StaleGraphError: Memory that graphs read was moved or changed its dtype since the capture, or the module
                holds something else, or a part has another forward or class. With
                `Capture(on_change="recapture")` the graphs are released instead, and the next call recaptures.
        """
        self.pool.synchronize()
        self.executor.begin()
        if (checks := self.executor.store.checks) is not None:
            checks.raise_finding()
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.check_memory()

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record the sizes of calls, to plan budgets from them.

            with encoder.record() as trace:
                serve()
            trace.save("trace.json")

        Eager calls are recorded, too. A call whose items only the GPU has seen is recorded as the most that so many
        rows and items may need.

        Raises:
            SpecError: Calls bring padded batches that stay padded, whose budgets do not follow from rows alone.
        """
        if self.spec.layout.padded:
            raise SpecError(
                "budgets of padded batches are not planned: list them as a vg.budgets.PaddedLadder, or pack the rows, "
                "see vg.Mask(packed=True)"
            )
        trace = Trace(lambda: self._budgets.measured or self.costs)  # disabled budgets too: a plan may enable them
        self.executor.traces.append(trace)
        try:
            yield trace
        finally:
            self.executor.traces.remove(trace)
            trace.costs = trace.costs  # as they are now, whatever the encoder measures later

    def report(self, path: str | os.PathLike[str] | None = None, *, detail: bool = False) -> str:
        """Return the used budgets, their measured times, replays, padding, eager runs and memory as a text for people.

        With a path, such as `"report.html"`, it is also written there as a page with figures. `detail` adds the budgets
        that no call has used, if there are many, and what the numbers mean.
        """
        text = report(repr(self), self.executor.store, self.stats, detail)
        if path is not None:
            section = Section("", text, self.costs, self.stats)
            Path(path).write_text(page(repr(self), [section]), encoding="utf-8")
        return text

    def metrics(self) -> list[Metric]:
        """Return counters and gauges for `vg.stats.prometheus`. Waits for nobody."""
        return [*self.stats.metrics(), *gauges(self.executor.store)]

    def poison(self) -> None:
        """Fill the pool, outputs included, with NaN, and floating rows of the arena with NaN, infinity and 1e4 in turn.

        The next call finds them as its padding, and no active row may change because of them; later ones find zeros, as
        any call does. For tests.
        """
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.poison()

    # Budgets, graphs and their memory

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """All budgets, ascending."""
        return self._budgets.budgets

    @property
    def disabled(self) -> dict[Budget, str]:
        """The disabled budgets, and why."""
        return dict(self._budgets.disabled)

    @property
    def costs(self) -> Costs:
        """Costs of the enabled budgets: measured after the first capture on a GPU, assumed before.

        Assign `Costs` to use others.
        """
        return self._budgets.costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        if not isinstance(costs, Costs):
            raise SpecError(f"costs are of type {type(costs).__name__}: expected the Costs of an encoder")
        with self.pool.exclusive(), self.pool.order:
            self._budgets.learn(costs)

    def capture(self: Self, call: Mapping[str, Any] | None = None, /, **static_args: Any) -> Self:
        """Capture the graphs now, for calls with these static arguments, or for those like an example call.

            encoder.capture({"pixel_values": pixels, "grid_thw": [(1, 14, 14)]})

        The module itself runs the example once, as it does with the first call otherwise: what it initialises from its
        first rows, or builds at its first call, follows from rows that are real. Without an example the rows are made
        up, and the module itself does not run before its first call. The first call of the graphs is compared with the
        module itself in both cases. With `Capture(start_step=...)` a part of the budgets is captured, and the others by
        calls. Does nothing if calls run eager, for example because no graph fits `memory`.
        Allocates the arena and the graphs' pool. Synchronizes with the host.

        Args:
            call: The keyword arguments of a call, static ones among them.
            **static_args: Static arguments, without an example.

        Raises:
            SpecError: The shape of a row is not known yet: give an example, or `vg.inputs.Rows(shape=...)`.
            InputError: A static argument the module does not take, or an example that is no call.
            CaptureError: The module cannot be captured, or its mode is not that of construction.
        """
        self.executor.check_usable()
        if call is not None and not isinstance(call, Mapping):
            raise InputError(f"capture came with {quoted(call)}: expected a call as a dict of its arguments by name")
        example = None if call is None else self.executor.bind((), {**call, **static_args})
        inputs = self.executor.capture_inputs(static_args, example)
        if inputs is not None:
            with self.pool.exclusive(), self.pool.order:
                if not self._budgets.none_fits:
                    self.executor.capture(inputs, example)
        return self

    def capture_again(self: Self) -> Self:
        """Capture what is missing of the graphs that calls have had so far, for all their static arguments.

        Does nothing if there were none, or if calls run eager. Synchronizes with the host.

        Raises:
            CaptureError, StaleGraphError: As for `capture`.
        """
        self.executor.check_usable()
        with self.pool.exclusive(), self.pool.order:
            for inputs in self.executor.store.inputs_now():
                if not self._budgets.none_fits:
                    self.executor.capture(inputs, None)
        return self

    def capture_pending(self, most: int | None = 1) -> list[Budget]:
        """Capture budgets that calls requested but that have no graph yet, the most requested first.

        For the time between calls: takes the pool's turn for one graph at a time. With `Capture(lazy=True)` the first
        budget comes with the largest one, which sizes the memory that all share. With `Capture(exact=...)` sizes of
        calls that came at least four times recently follow, the most frequent first: there is one more graph, or it
        takes the place of that of a size which came at most half as often.

        Args:
            most: Largest number of graphs; `None` is all.

        Returns:
            The budgets and sizes that were captured, or are left out because they could not be.

        Raises:
            SpecError: The encoder is neither lazy nor has graphs of exact sizes, so its calls capture what they need.
            CaptureError, StaleGraphError, and errors of the module: As for `capture`. Calls go on eager.
        """
        self.executor.check_usable()
        return self._between_calls().capture(most)

    def capture_in_background(self) -> "Future[None]":
        """Capture what `capture_pending` does in a thread of its own, one graph after the other.

        Calls of a lazy encoder do not wait meanwhile, unless they began before the capture: they run eager while a
        graph is captured, and use the existing graphs in between. Other calls wait for the graph.

        Returns:
            A future that is pending as long as the thread works: the same for all callers meanwhile. `cancel()` ends
            it, and so do the end of the encoder and of the interpreter. An error ends it too, and is its `exception()`.

        Raises:
            SpecError: As for `capture_pending`.
        """
        self.executor.check_usable()
        return Background.of(self._between_calls(), self.pool).future

    def _between_calls(self) -> CaptureQueue:
        if self._queue.requests is not None:
            self._warm_start.request_used(self._queue.requests)
        elif self._queue.exact is None:
            raise SpecError(
                "calls of this encoder capture what they need: expected one with Capture(lazy=True) or Capture(exact=N)"
            )
        return self._queue

    def add_budget(self, budget: int | Budget) -> Budget:
        """Add a budget while serving, from any thread.

        It is captured now, or with `Capture(lazy=True)` when calls request it. If it needs more rows or items than the
        arena has, all graphs are recaptured in a larger arena: calls meanwhile wait, or run eager if the encoder is
        lazy. With `memory` it may be evicted at once.

        Args:
            budget: Rows, or a `Budget`.

        Returns:
            The budget, its rows rounded up as those of the others.

        Raises:
            BudgetError: It exists already, or no item could use it.
            SpecError: Ranks share the module, as in a `TensorParallelEncoder`.
            CaptureError, StaleGraphError, and errors of the module: As for `capture`; the budget stays.
        """
        self.executor.check_usable()
        (one,) = resolve_budgets(budget, self.spec.row_multiple, self.spec.usage)
        check_budgets(self.spec, [one])
        with self.pool.exclusive(), self.pool.order:
            if one in self.budgets:
                raise BudgetError(f"{one} is a budget of the encoder already{self._budgets.why_disabled(one)}")
            self.executor.store.add(one)
        return one

    def drop_budget(self, budget: int | Budget) -> None:
        """Remove a budget while serving, from any thread. Its calls use others, or run eager.

        Waits for the last replay, and frees what its graph alone takes. Memory that graphs share stays as large as the
        largest budget needed until `release`.

        Args:
            budget: Rows, or a `Budget`, as for `add_budget`.

        Raises:
            BudgetError: There is no such budget, or no other one.
            SpecError: Ranks share the module, as in a `TensorParallelEncoder`.
        """
        self.executor.check_usable()
        (one,) = resolve_budgets(budget, self.spec.row_multiple, self.spec.usage)
        with self.pool.exclusive(), self.pool.order:
            if one not in self.budgets:
                raise BudgetError(f"{one} is not a budget of the encoder: expected one of encoder.budgets")
            if len(self.budgets) == 1:
                raise BudgetError(f"{one} is the only budget: add another one first")
            self.executor.store.drop(one)

    def release(self) -> None:
        """Free graphs and arena once all queued work has run: this waits for the last replay.

        The next call recaptures, with the weights as they are then. Memory that torch keeps for cuBLAS by stream (32
        MiB on an H200) stays.
        """
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.release()

    def bytes(self) -> int:
        """Return the bytes that graphs, arena and pool hold. A shared pool counts in full; tapes share no memory."""
        return bytes_of([self.executor.store])

    def save_warmup(self, path: str | os.PathLike[str]) -> None:
        """Write measurements of this run, and the budgets its calls used, for `Capture(warmup=path)` in the next run.

        They are a section of the file: those of other encoders stay, if the same versions of torch, Triton and this
        library wrote them. `vg.encoders(model).save_warmup(path)` writes those of all towers of a wrapped model.

        Budgets are saved for each set of static arguments that JSON holds: numbers, texts, booleans and `None`. Others
        are left out. Compiled kernels are not part of it: Triton and torch's compiler keep them in files of their own.

        Raises:
            OSError: The file cannot be written.
        """
        write_sections(path, self.warmup_sections())

    def warmup_sections(self) -> list[WarmupSection]:
        """Return what `save_warmup` writes."""
        return [self._warm_start.section()]

    # In the place of the module: `nn.Module` looks for parts and weights in dictionaries, here those of the module

    _parameters: Any = _of_module("_parameters")
    _buffers: Any = _of_module("_buffers")
    _non_persistent_buffers_set: Any = _of_module("_non_persistent_buffers_set")

    @property
    def _modules(self) -> Any:
        self._check_is_no_part()
        return self.module._modules

    @_modules.setter
    def _modules(self, value: Any) -> None:
        pass

    def _check_is_no_part(self) -> None:
        if any(part is self for part in self.module._modules.values()):
            raise SpecError(
                f"an encoder of {type(self.module).__name__} was assigned as an attribute of that module itself, which "
                "registers it as a part: to put it in the place of the forward, assign encoder.forward"
            )

    @property
    def training(self) -> bool:
        """Mode of the module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # nn.Module sets it before
            self.module.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a part or a weight of the module there; any other attribute on the encoder, which registers nothing.

        Raises:
            AttributeError: Another module; make an encoder of that one.
        """
        if name == "module":
            raise AttributeError(
                f"the module of an encoder cannot be set, because its graphs are those of its "
                f"{type(self.module).__name__}: make an encoder of the other module"
            )
        may_be_part = name not in vars(self) and isinstance(value, nn.Module | Tensor | None)
        if may_be_part and (name in self._parameters or name in self._buffers or name in self._modules):
            setattr(self.module, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        if name == "module" or name.startswith("__"):  # not set yet, or a protocol that the module has for itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict."""
        self._check_is_no_part()
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load the module's own weights, as the module does."""
        self.module._load_from_state_dict(*args)

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
