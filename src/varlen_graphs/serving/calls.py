"""How calls are answered: read, counted, planned, and replayed, checked or run eager."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.choice import Choice
from varlen_graphs.capture.state import State
from varlen_graphs.errors import InputError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import Captured, NoBudgetError
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.padded import PaddedMask, pack_rows
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.planner import Planner
from varlen_graphs.serving.borrowed import Borrowed
from varlen_graphs.serving.lazy import Wanted
from varlen_graphs.serving.replay import EAGER_IS_FASTER, Replays
from varlen_graphs.serving.staging import Stage, staged
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.signature import Signature
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.trace import Size, Trace
from varlen_graphs.verify.in_service import InService


class Calls:
    """Answers the calls of an encoder.

    Args:
        signature: Reads arguments.
        choice: Chooses between graphs and eager.
        captured: Tells what can be called.
        planner: Plans replays.
        forward: Runs without graphs.
        replays: Runs with graphs.
        state: Tells of hooks.
        stats: Counts.
        checks: Compares the first replays, if that was asked for.
        wanted: Plans while graphs are missing, if calls are not to wait for them.
        off: Tells why a call made now must run without graphs.
        lends: Whether outputs are `Borrowed`.

    Attributes:
        choice: As given.
        checks: As given.
        traces: What counts the sizes of calls.
    """

    def __init__(
        self,
        signature: Signature,
        choice: Choice,
        captured: Captured,
        planner: Planner,
        forward: Forward,
        replays: Replays,
        state: State,
        stats: Stats,
        checks: InService | None,
        wanted: Wanted | None,
        off: Callable[[nn.Module], str | None] | None,
        lends: bool,
    ) -> None:
        self.choice = choice
        self.traces: list[Trace] = []
        self._signature = signature
        self._captured = captured
        self._planner = planner
        self._forward = forward
        self._replays = replays
        self._state = state
        self._stats = stats
        self.checks = checks
        self._wanted = wanted
        self._off = off
        self._lends = lends
        self._spec = forward.spec

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments of a call, sorted.

        Raises:
            InputError: One that is missing, unknown, undeclared, or on the wrong device.
        """
        call = self._signature.bind(args, kwargs)
        self._captured.check_rows(call.rows)
        if self._off is not None and call.beyond is None:
            call.beyond = self._off(self._forward.module)
        return call

    def read_layout(self, call: Call) -> Layout:
        """The items of a call; where it brings a padded batch to pack, this packs it."""
        layout = self._spec.read_layout(call.description, call.rows.shape)
        if self._spec.packed.padded_by is not None:
            call.length = call.rows.shape[1]
            with torch.no_grad():
                call.rows = pack_rows(call.rows, layout.rows)
        return layout

    def answer(self, call: Call) -> Any:
        """The output of a call."""
        reason, backend = self.choice.of(call)
        if backend is not None and (budget := self._planner.unseen(call)) is not None:
            if self._wanted is not None and (budget := self._wanted.unseen(call, budget, backend)) is None:
                return self.encode(call, self.read_layout(call), self._wanted.reason, None)
            self._stats.count_call(call.items)
            self._trace_unseen(call)
            with suppress(NoBudgetError):
                if self.checks is not None:
                    packs = [Pack(budget, range(call.items))]
                    return self.checks.run(call, packs, partial(self._replays.run_unseen, call, budget, backend))
                return self._replays.run_unseen(call, budget, backend)
            return self._count_and_run_eager(self._replays.too_large, call, self.read_layout(call))
        return self.encode(call, self.read_layout(call), reason, backend)

    def encode(self, call: Call, layout: Layout, reason: str, backend: Backend | None) -> Any:
        """The output of items that the host knows: of a call, or of a part of one.

        Args:
            call: The call.
            layout: The items.
            reason: Why it runs eager if there is no backend.
            backend: What captures.
        """
        self._count(layout)
        packs: Sequence[Pack] = self._planner.packs(layout) if backend is not None else []
        if packs and all(one.budget is None for one in packs):
            reason, backend = self._replays.too_large, None
        elif packs and self._planner.eager_is_faster(packs, layout) and self._captured.is_timed(call.statics):
            reason, backend = EAGER_IS_FASTER, None
        if backend is not None and self._wanted is not None:
            packs = self._wanted.packs(call, layout, packs, backend)
            if not packs:
                reason, backend = self._wanted.reason, None
        if backend is None:
            return self._count_and_run_eager(reason, call, layout)
        with suppress(NoBudgetError):
            if self.checks is not None:
                replay = partial(self._replays.run, call, layout, packs, backend)
                return self.checks.run(call, packs, replay, layout)
            return self._replays.run(call, layout, packs, backend)
        return self._count_and_run_eager(self._replays.too_large, call, layout)

    def eager(self, call: Call) -> Any:
        """The output of a call without graphs; it is not counted."""
        return self._run_eager(call, self.read_layout(call))

    @contextmanager
    def stage(self, layout: Any, arguments: dict[str, Any]) -> Iterator[Stage]:
        """A block in which the caller writes the rows of a call; see `GraphedEncoder.stage`."""
        packed = self._spec.packed
        if packed.padded_by is not None:
            raise InputError(
                f"{packed.name} comes as a padded batch, which is packed on its way in, so there is nothing to write in"
                " place; call the encoder with it"
            )
        if packed.name in arguments:
            raise InputError(f"{packed.name} came with a stage, which hands out the rows to write; leave it out")
        example = packed.as_argument(self._captured.no_rows())
        call = self.bind((), {**arguments, packed.name: example, self._spec.layout.name: layout})
        described = dict(call.description)
        if isinstance(self._spec.layout, PaddedMask):  # which may be wider than what it marks
            del described[self._spec.layout.name]
        self._spec.check_description(described, self._planner.in_use.budgets[-1].rows)
        items = self._spec.read_layout(call.description, ())
        budget = self._planner.whole(items)  # bounds what is allocated, with a graph or without
        reason, backend = self.choice.of(call)
        self._count(items)
        if backend is not None and budget is not None and self._wanted is not None:
            has_graph = self._wanted.whole(call, items, budget, backend)
            reason, backend = (reason, backend) if has_graph else (self._wanted.reason, None)
        if backend is not None:
            checked = None if self.checks is None else partial(self.checks.run_stage, call, items)
            with self._replays.stage(call, items, backend, checked) as stage:
                if stage is not None:
                    yield stage
                    return
            reason = self._replays.too_large
        self._stats.count_eager(reason)
        rows = example.new_empty(self._spec.argument_shape(items, call.rows))
        call.original[packed.name], call.rows = rows, packed.rows_first(rows)
        hooked = self._state.has_hooks()
        with torch.no_grad(), staged(rows, lambda: self._without_graph(call, items, hooked)) as stage:
            yield stage

    def _count(self, layout: Layout) -> None:
        self._stats.count_call(len(layout))
        for trace in self.traces:
            size = Size(*self._spec.needs.load(layout), largest=max(layout.group_rows))
            trace.count(size, self._spec.needs.squares(layout))

    def _trace_unseen(self, call: Call) -> None:
        """Count a call by the most that it can need, its largest item by what is known of it: no less than the mean."""
        if not self.traces:
            return
        most = self._planner.most(call)
        if 0 < call.items * self._spec.row_multiple <= most.rows:  # others are wrong, as the GPU finds
            size = Size(*most, largest=max(most.longest, -(-most.rows // call.items)))
            for trace in self.traces:
                trace.count(size)

    def _count_and_run_eager(self, reason: str, call: Call, layout: Layout) -> Any:
        self._stats.count_eager(reason)
        return self._run_eager(call, layout)

    def _run_eager(self, call: Call, layout: Layout) -> Any:
        output = self._without_graph(call, layout, self._state.has_hooks())
        return Borrowed(output) if self._lends else output

    def _without_graph(self, call: Call, layout: Layout, hooked: bool) -> Any:
        if self.checks is not None and self.checks.distrusts_forward:
            return self._forward.reference(call, layout)
        return self._forward.without_graph(call, layout, hooked)
