"""Rows that the caller writes straight into the arena."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.calls.execute import Executor
from varlen_graphs.calls.row_checks import check_extra_inputs, check_rows, no_rows
from varlen_graphs.capture.mode import NO_GRAPHS
from varlen_graphs.capture.pool import on_device
from varlen_graphs.capture.stream_order import current_stream, follow
from varlen_graphs.capture.torch_modes import INSTEAD, WATCHERS, records
from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import check_description, check_inputs, eager_reason, parse
from varlen_graphs.errors import InputError
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.routing.router import Route


class Stage:
    """Rows to write, and the output of them: handed out by `GraphedEncoder.stage`.

    Args:
        rows: Memory for the rows.
        run: Encodes them.
    """

    def __init__(self, rows: Tensor, run: Callable[[], Any]) -> None:
        self._rows = rows
        self._stream = current_stream(rows.device) if rows.is_cuda else None
        self._run: Callable[[], Any] | None = run
        self._output: Any = None
        self._computed = False

    @property
    def rows(self) -> Tensor:
        """The rows to write, shaped as in a call, in the module's dtype and on its device; uninitialised.

        A padded batch is as long as its longest item, and not contiguous.

        Raises:
            InputError: The output was computed, or the block has ended: the memory belongs to other calls now.
        """
        if self._run is None:
            raise InputError("stage.rows was read after stage.output or after the block: write the rows before that")
        return self._rows

    @property
    def output(self) -> Any:
        """The module's output, owned by the caller: computed when it is first read, or at the end of the block.

        Raises:
            InputError: An error ended the block before there was one.
        """
        self.finish()
        if not self._computed:
            raise InputError("there is no stage.output: an error ended the block before it was computed; stage again")
        return self._output

    def finish(self) -> None:
        """Compute the output, unless it was computed or the block has ended."""
        if self._run is not None:
            run, self._run = self._run, None
            if self._stream is not None:
                now = current_stream(self._rows.device)
                follow(now, self._stream)  # where the rows are written
                self._rows.record_stream(now)
            self._output = run()
            self._computed = True

    def close(self) -> None:
        """End the time to write."""
        self._run = None


@contextmanager
def stage(executor: Executor, layout: Any, arguments: dict[str, Any]) -> Iterator[Stage]:
    """Let the caller write the rows of a call inside the block; see `GraphedEncoder.stage`."""
    executor.begin()
    spec, store = executor.spec, executor.store
    reason = executor.mode.eager_reason((layout,), arguments)
    if reason in WATCHERS and records(reason):
        raise InputError(f"stage was called under {reason}, which records no rows that come later; {INSTEAD}")
    call = _bind(executor, layout, arguments)
    assert call.layout is not None  # noqa: S101 - it was just read
    executor.router.single_budget(call.layout, executor.router.budgets.costs)  # bounds what is allocated, eager too
    trained = executor.mode.why_trained(call.requires_grad) if torch.is_grad_enabled() else None
    reason = trained or call.eager_reason or reason or executor.mode.why_no_graphs(call.rows.device)
    reason = reason or executor.router.why_wait(call)
    is_first = (
        reason is None and not store.lazy and store.find(call.key) is None
    )  # the module itself runs the first call
    if reason is None and not is_first:
        with torch.no_grad(), on_device(call.rows.device), executor.pool.exclusive(), executor.pool.order:
            usable, route, _ = executor.route(call)
            reason = route.reason
            if usable.graphs is not None and route.batches and route.batches[0].budget is not None:
                call.rows = usable.graphs.arena.call(call.layout, route.batches[0].budget, {}).rows
                call.original[spec.row_input.name] = rows = spec.row_input.as_argument(call.rows)
                store.staged = True
                try:
                    with _staged(rows, partial(_replay, executor, call, route, usable.graphs)) as staged:
                        yield staged
                finally:
                    store.staged = False
                return
    rows = call.rows.new_empty(spec.argument_shape(call.layout, call.rows))
    call.original[spec.row_input.name], call.rows = rows, spec.row_input.rows_first(rows)
    if is_first:
        run = partial(executor.answer, replace(call, staged=False), None)
    else:
        run = partial(executor.train if trained else executor.eager, call, reason or NO_GRAPHS)
    with torch.no_grad(), _staged(rows, run) as staged:
        yield staged


def _bind(executor: Executor, layout: Any, arguments: dict[str, Any]) -> Call:
    """Bind a call whose rows come later."""
    spec = executor.spec
    packed = spec.row_input
    if spec.packs:
        raise InputError(
            f"{packed.name} comes as a padded batch, which is packed on its way in, so there is nothing to write in "
            "place; call the encoder with it"
        )
    if packed.strip:
        raise InputError(f"{packed.name} is a strip, which graphs read row by row; call the encoder with it")
    if packed.name in arguments:
        raise InputError(f"{packed.name} came with a stage, which hands out the rows to write; leave it out")
    example = packed.as_argument(no_rows(executor.store))
    if spec.layout.has_argument:
        call = executor.signature.bind((), {**arguments, packed.name: example, spec.layout.name: layout})
    elif is_integer(layout):
        call = executor.signature.bind((), {**arguments, packed.name: example})
        call.description[spec.layout.name] = range(layout)
    else:
        raise InputError(f"stage({quoted(layout)}): expected the number of items, an integer")
    check_rows(executor.store, call.rows.device, call.rows.dtype)
    if call.inputs:
        check_extra_inputs(executor.store, call)
    described = dict(call.description)
    if isinstance(spec.layout, Mask):  # which may be wider than what it marks
        del described[spec.layout.name]
    check_description(described, executor.router.budgets.budgets[-1].rows)
    call.layout = parse(spec, call.description, ())
    call.eager_reason = call.eager_reason or eager_reason(spec, call.layout)
    call.staged = True
    check_inputs(spec, call)
    return call


def _replay(executor: Executor, call: Call, route: Route, graphs: GraphSet) -> Any:
    executor.store.staged = False
    with executor.pool.exclusive(), executor.pool.order:  # the stream may be another one now
        return executor.run(call, route, graphs)


@contextmanager
def _staged(rows: Tensor, run: Callable[[], Any]) -> Iterator[Stage]:
    """Let the caller write `rows`; run them at the end of the block, at the latest."""
    staged = Stage(rows, run)
    try:
        yield staged
        staged.finish()
    finally:
        staged.close()
