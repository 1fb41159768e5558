"""The operation of an encoder: captures, budgets, memory, reports."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from varlen_graphs.capture.options import Capture
from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import BudgetError, SpecError
from varlen_graphs.layout.budgets import Budget, resolve_budgets
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.serving.background import Background
from varlen_graphs.serving.execute import Executor
from varlen_graphs.serving.html import page
from varlen_graphs.serving.report import report
from varlen_graphs.serving.stand_in import StandIn
from varlen_graphs.serving.wanted import Wanted
from varlen_graphs.serving.warm_start import WarmStart
from varlen_graphs.serving.warmup_file import WarmupSection, write_sections
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.checks import check_budgets
from varlen_graphs.spec.image_processor import read_images
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.trace import Trace

Self = TypeVar("Self", bound="OperatedEncoder")


class OperatedEncoder(StandIn):
    """An encoder in operation: its captures, budgets, memory and reports.

    Args:
        module: The module.
        executor: The path of a call.
        wanted: Captures between calls.
        identity: Options that measurements depend on.
        capture: Options of captures, among them the warm-up file.

    Attributes:
        module, executor: As given.
        spec, pool, stats: Those of the executor.
    """

    def __init__(
        self, module: nn.Module, executor: Executor, wanted: Wanted, identity: tuple[object, ...], capture: Capture
    ) -> None:
        super().__init__(module)
        self.executor = executor
        self.spec: BufferSpec = executor.spec
        self.pool: Pool = executor.pool
        self.stats: Stats = executor.stats
        self._budgets: EnabledBudgets = executor.store.budgets
        self._wanted = wanted
        self._warm_start = WarmStart(executor, identity, capture)

    def read_images(self, images: Any) -> dict[str, Any]:
        """Resize decoded images as the processor of `normalize=vg.spec.Normalize.of(processor)`, or `Patches.of`.

        Takes one image or a batch that the processor takes: pictures of PIL, arrays or tensors of bytes. Returns the
        arguments of a call, where the processor makes them, so that another thread may do it than the one that calls.

        Raises:
            InputError: The declaration has no processor, or there is no image, or one that cannot be used.
        """
        return read_images(self.spec, images, self.executor.signature.names)

    def from_images(self, images: Any) -> Any:
        """Encode decoded images: the host resizes them, see `read_images`, and graphs do the rest.

        Copies bytes to the device of the module. Syncs with the device if the images are elsewhere.
        """
        arguments, rows = self.read_images(images), self.spec.packed.name
        return self(**arguments | {rows: arguments[rows].to(self.executor.forward.device)})

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
                "budgets of padded batches are not planned: list them as a PaddedLadder, or pack the rows, see "
                "PackedMask"
            )
        trace = Trace(lambda: self._budgets.measured or self.costs)  # disabled budgets too: a plan may enable them
        self.executor.traces.append(trace)
        try:
            yield trace
        finally:
            self.executor.traces.remove(trace)
            trace.costs = trace.costs  # as they are now, whatever the encoder measures later

    def check(self) -> None:
        """Wait for all calls, and raise what was wrong with layouts that only the GPU has seen.

        Checks all memory that graphs read, of which a call checks a part.

        Raises:
            LayoutError: The items of a call were impossible, did not match its rows, or broke a promise.
            StaleGraphError: Memory that graphs read was moved or changed its dtype since the capture. With
                `Capture(on_change="recapture")` the graphs are released instead, and the next call recaptures.
        """
        self.pool.synchronize()
        self.executor.begin()
        if (checks := self.executor.store.capturer.checks) is not None:
            checks.raise_finding()
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.check_memory()

    def capture(self: Self, **statics: Any) -> Self:
        """Capture the graphs now, for calls with these static arguments.

        Does nothing if calls run eager, for example because no graph fits `memory`. Allocates the arena and the graphs'
        pool. Synchronizes with the host.

        Raises:
            SpecError: The shape of a row is not known yet: give `PackedRows(shape=...)`, or make a call first.
            InputError: A static argument the module does not take.
            CaptureError: The module cannot be captured, or its mode is not that of construction.
        """
        self.executor.check_usable()
        inputs = self.executor.capture_inputs(statics)
        if inputs is not None:
            with self.pool.exclusive(), self.pool.order:
                if not self._budgets.none_fits:
                    self.executor.store.capture(inputs)
        return self

    def capture_wanted(self, most: int | None = 1) -> list[Budget]:
        """Capture budgets that calls requested but that have no graph yet, the most requested first.

        For the time between calls: takes the pool's turn for one graph at a time. With `Capture(lazy=True)` the first
        budget comes with the largest one, which sizes the memory that all share. With `Capture(exact=...)` sizes of
        calls that came at least four times of late follow, the most frequent first: there is one more graph, or it
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
        """Capture what `capture_wanted` does in a thread of its own, one graph after the other.

        Calls of a lazy encoder do not wait meanwhile, unless they began before the capture: they run eager while a
        graph is captured, and use the existing graphs in between. Other calls wait for the graph.

        Returns:
            A future that is pending as long as the thread works: the same for all callers meanwhile. `cancel()` ends
            it, and so do the end of the encoder and of the interpreter. An error ends it too, and is its `exception()`.

        Raises:
            SpecError: As for `capture_wanted`.
        """
        self.executor.check_usable()
        return Background.of(self._between_calls(), self.pool).future

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
        (one,) = resolve_budgets(budget, self.spec.row_multiple, self.spec.needs)
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
        (one,) = resolve_budgets(budget, self.spec.row_multiple, self.spec.needs)
        with self.pool.exclusive(), self.pool.order:
            if one not in self.budgets:
                raise BudgetError(f"{one} is not a budget of the encoder: expected one of encoder.budgets")
            if len(self.budgets) == 1:
                raise BudgetError(f"{one} is the only budget: add another one first")
            self.executor.store.drop(one)

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

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return budgets, their measured times, replays, padding and eager runs as a table for people.

        With a path, such as `"report.html"`, it is also written there as a page with figures.
        """
        text = report(repr(self), self.executor.store, self.stats)
        if path is not None:
            Path(path).write_text(page(repr(self), text, self.costs, self.stats), encoding="utf-8")
        return text

    def release(self) -> None:
        """Free graphs and arena once all queued work has run: this waits for the last replay.

        The next call recaptures, with the weights as they are then. Memory that torch keeps for cuBLAS by stream (32
        MiB on an H200) stays.
        """
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.release()

    def bytes(self) -> int:
        """Return the bytes that graphs, arena and pool hold. A shared pool counts in full; tapes share no memory."""
        with self.pool.exclusive(), self.pool.order:
            return self.executor.store.bytes()

    def poison(self) -> None:
        """Fill the pool, outputs included, with NaN, and floating rows of the arena with NaN, infinity and 1e4 in turn.

        The next call finds them as its padding, and no active row may change because of them; later ones find zeros, as
        any call does. For tests.
        """
        with self.pool.exclusive(), self.pool.order:
            self.executor.store.poison()

    def _between_calls(self) -> Wanted:
        if self._wanted.requests is not None:
            self._warm_start.request_used(self._wanted.requests)
        elif self._wanted.exact is None:
            raise SpecError(
                "calls of this encoder capture what they need: expected one with Capture(lazy=True) or Capture(exact=N)"
            )
        return self._wanted
