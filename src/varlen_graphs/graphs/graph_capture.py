"""Capture graphs for one set of static arguments: on shadows of the module, which show what it keeps."""

import gc
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from textwrap import shorten

from torch import Tensor

from varlen_graphs.attention.timing import NotRepeatedError, measuring, repeating
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.backend import CAPTURE_LOCK, Backend
from varlen_graphs.capture.consensus import Failure
from varlen_graphs.capture.memory import empty_cache, forget_frames, move_from_pool
from varlen_graphs.capture.mode import Mode
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import CaptureError
from varlen_graphs.graphs.allowance import Allowance
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.bound_forward import BoundForward, outputs_of
from varlen_graphs.graphs.cached_state import NOT_COMPUTED, ODD, Run, StateCheck, raise_changed_outside, runs_of
from varlen_graphs.graphs.calibrate import ReplayTimes
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet, HeldMemory
from varlen_graphs.graphs.output_form import OutputForm, check_constants
from varlen_graphs.graphs.progress import Progress
from varlen_graphs.kernels.launch import compiling_in_threads
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.parts import Parts, SizeError
from varlen_graphs.shadows.shadow import Shadow, address_of, describe
from varlen_graphs.shadows.shared_writes import SharedWrites
from varlen_graphs.torch_dispatch.captured_inputs import CapturedInputs
from varlen_graphs.torch_dispatch.known_inputs import KnownInputs, OtherRunError

MOST_KEPT = 1 << 22
"""Bytes of clones of buffers, and of a sample of the check, that are kept between the captures of a set."""


class GraphCapture:
    """One capture of graphs of a set. All runs are those of shadows of the module.

    Args:
        graphs: The set, which gets the graphs.
        forward: The forward over the module itself.
        mode: The mode that graphs hold for.
        backend: Captures graphs.
        call: The call that needs them, on which runs are made; `None` makes a sample up.
        fallback: The budget that calls use without the graph of exactly their size, if the capture is of such a one.
        defaults: Budgets that nobody asked for.
        allowance: Decides which of these are left out.
        times: Times the graph of each budget while the next one is captured; `None` times none.

    Attributes:
        check: The check of what the module keeps, if the set has no graphs yet.
        eager: The forward that eager runs beside the capture use.
        shadow: Its shadow of the module.
        left_out: Default budgets that take too much memory or time, with the reasons.
        compile_seconds: Time that torch's compiler took; `None` if there is none.
    """

    def __init__(
        self,
        graphs: GraphSet,
        forward: Forward,
        mode: Mode,
        backend: Backend,
        call: Call | None,
        fallback: Budget | None,
        defaults: Collection[Budget],
        allowance: Allowance,
        times: ReplayTimes | None,
    ) -> None:
        self._graphs = graphs
        self._original = forward
        self._mode = mode
        self._backend = backend
        self._fallback = fallback
        self._defaults = frozenset() if fallback else frozenset(defaults)
        self._allowance = allowance
        self._times = times
        self._bound = partial(BoundForward, static_args=graphs.inputs.static_args, mode=mode)
        self.check = None if graphs else _state_check(forward, self._bound, graphs.arena, call)
        self.eager, self.shadow = self._beside()
        self._has_call = call is not None
        self.left_out: dict[Budget, str] = {}
        self.compile_seconds: float | None = None
        self._shadows: list[Shadow] = []  # those that graphs were captured over
        self._warms_up = False
        self._ran: set[Budget] = set()  # whose runs may have filled a cache that watched runs find filled

    def run(self, budgets: Sequence[Budget], spare: Sequence[Budget]) -> list[Budget]:
        """Capture budgets that have no graph yet, largest first; return those that were tried.

        A budget whose capture fails is left out. If it is the largest, and there is no graph yet, the smallest is tried
        next: if that fails as well, the forward cannot be captured. Memory may be short for large budgets only, so then
        all are tried, spare ones too, until there is a graph. After any other error this call leaves nothing behind.

        Args:
            budgets: The budgets.
            spare: More budgets, to try while there is no graph.

        Raises:
            SpecError: The output is not as declared.
            CaptureError: There is no graph, and no budget could be captured; or what the module keeps changes outputs.
            Exception: The error of the forward at the largest budget and at the smallest.
        """
        graphs = self._graphs
        if graphs.constants is None:
            graphs.snapshot = self._original.kept = self.shadow.snapshot
        if self.check is not None:  # later ones go by what the first have shown
            self._begin_check(self.check, max(budgets))
        budgets, spare = self._within_allowance(budgets, spare)
        if self.check is not None:
            graphs.meets_compiler = self.check.writes.met_compiled or self._original.compiled is not None
            self._warms_up = bool(self.check.shadow.changed())  # such as a table that grows
            graphs.mutated_state |= self.check.mutated_state()
            graphs.captured = graphs.captured if self._original.compiled is not None else None
        self._prepare_captured()
        forward, _ = self._captured
        if is_new := graphs.constants is None:
            with graphs.consensus.collective_try() as outcome, graphs.consensus.dry_run(), compiling_in_threads():
                graphs.constants = forward.probe(graphs.arena)
            outcome.check()
        if is_new:
            self._compile_kernels(budgets, forward)
            self._choose_attention(budgets)
        memory, known = CapturedInputs(graphs.arena.rows.device, "the module", not forward.is_compiled), graphs.memory()
        memory.held, memory.read, memory.state = known.aliases, known.read, known.state
        tried: list[Budget] = []
        # Whoever keeps the traceback of an error does not keep the memory.
        with graphs.dropped_on_error(tried), self._times or nullcontext():
            self._capture_all(budgets, spare, tried, partial(self._capture, memory))
        graphs.moving |= self.shadow.places().union(*(shadow.places() for shadow in self._shadows))
        own = known.own.union(*(shadow.own() for shadow in self._shadows))
        graphs.hold(tried, HeldMemory(memory.held, memory.read, memory.state, own))
        self.compile_seconds = forward.compile_seconds
        return tried

    def _beside(self) -> tuple[Forward, Shadow]:
        """Return the forward for eager runs beside the capture, and its shadow: of the check, or earlier ones."""
        graphs, check = self._graphs, self.check
        eager = graphs.eager if check is None else (check.forward, check.shadow)
        if eager is None or (check is None and not eager[1].is_current(graphs.moving)):
            shadow = Shadow(self._original.module)
            eager = self._original.on(shadow), shadow
        graphs.eager = eager if eager[1].nbytes <= MOST_KEPT else None
        return eager

    def _begin_check(self, check: StateCheck, budget: Budget) -> None:
        """Begin the check of what the module keeps, on a sample where the declared forward takes no such call.

        A host buffer may call another encoder, which no run of a capture may.
        """
        graphs, consensus = self._graphs, self._graphs.consensus

        is_bounded = budget not in self._defaults  # the allowance is for runs of others
        with (
            consensus.collective_try() as outcome,
            consensus.dry_run(),
            self._mode.autocast(graphs.arena.rows.device.type),
        ):
            try:
                at_capacity = partial(self._run_at_capacity, self._bound(check.forward), budget)
                check.begin(at_capacity if is_bounded else None, is_first=not self._has_call)
            except SizeError as error:
                forward = self._original.on(Shadow(self._original.module))
                raise self._bound(forward).explained(graphs.arena, error) from error
        if (failure := outcome.take()) is not None:
            if not self._has_call:
                raise failure.error
            self.check, self._has_call = _state_check(self._original, self._bound, graphs.arena, None), False
            self.eager, self.shadow = self._beside()
            self._begin_check(self.check, budget)

    @property
    def _captured(self) -> tuple[BoundForward, Shadow]:
        """The forward to capture, and its shadow, which shares what no run writes: graphs follow the module."""
        captured = self._graphs.captured
        assert captured is not None  # noqa: S101 - prepared
        return captured

    def _prepare_captured(self) -> None:
        """Make the forward to capture, or keep that of earlier graphs.

        The shadow is that of earlier graphs if nothing of it is its own, which later runs would write, and earlier
        graphs read, and nothing has changed that matters; and where torch's compiler has to see the forward, which is
        then one for all.
        """
        graphs = self._graphs
        if graphs.captured is None or not self._serves_again(graphs.captured[1]):
            shadow = Shadow(self._original.module, graphs.mutated_state)
            graphs.captured = self._bound(self._original.on(shadow), writes=SharedWrites(shadow)), shadow
        self._shadows.append(graphs.captured[1])

    def _serves_again(self, shadow: Shadow) -> bool:
        if self._original.compiled is not None:
            return True
        return not (shadow.cloned or shadow.places()) and shadow.is_current(self._graphs.moving)

    def _run_at_capacity(self, forward: BoundForward, budget: Budget, checked: bool = True) -> None:
        """Run rows that fill a budget; with `checked=False` such that ran before."""
        self._ran.add(budget)
        self._graphs.arena.load_sample(budget)
        forward.run_probe(self._graphs.checks.view(self._graphs.arena, budget), 2, checked)

    def _run_sample(self, budget: Budget, run: Callable[[Tensor, ItemTable, dict[str, Tensor]], object]) -> None:
        """Run the sample of a budget, without rows and other ranks."""
        graphs = self._graphs
        self._ran.add(budget)
        self._load_sample(budget)
        with graphs.consensus.dry_run():
            run(*graphs.checks.view(graphs.arena, budget))

    def _load_sample(self, budget: Budget) -> None:
        self._graphs.arena.load_sample(budget)
        self._graphs.arena.source.copy(budget.rows)  # of none, so that its kernel is loaded

    def _within_allowance(
        self, budgets: Sequence[Budget], spare: Sequence[Budget]
    ) -> tuple[Sequence[Budget], Sequence[Budget]]:
        """Return these budgets without the default ones that take too much memory or time, by runs of the check."""
        allowance, consensus = self._allowance, self._graphs.consensus
        defaults = [one for one in {*budgets, *spare} if one in self._defaults]
        if not defaults:
            return budgets, spare
        left_out: dict[Budget, str] = {}
        writes = SharedWrites(self.shadow) if self.check is None else self.check.writes
        watched, unwatched = self._bound(self.eager, writes=writes), self._bound(self.eager)

        def again(budget: Budget) -> None:
            own = watched if self.shadow.random.was_drawn else unwatched  # which is as fast as a run can be
            self._run_at_capacity(own, budget, checked=False)

        with CAPTURE_LOCK, consensus.collective_try() as outcome, consensus.dry_run():
            left_out = allowance.of_runs(defaults, partial(self._run_at_capacity, watched), again)
        outcome.take()  # errors come again
        budgets, spare = self._without(consensus.same(left_out), budgets, spare)
        left_out = allowance.of_tapes([one for one in budgets if one in defaults])
        return self._without(consensus.same(left_out), budgets, spare)

    def _without(
        self, left_out: dict[Budget, str], budgets: Sequence[Budget], spare: Sequence[Budget]
    ) -> tuple[Sequence[Budget], Sequence[Budget]]:
        """Leave budgets out. The largest one left takes the place of a larger one, which sizes the memory of all."""
        self.left_out |= left_out
        kept, others = ([one for one in some if one not in left_out] for some in (budgets, spare))
        if others and (not kept or max(others) > max(kept)) and len(kept) < len(budgets):
            largest = max(others)
            kept, others = [*kept, largest], [one for one in others if one != largest]
        return kept, others

    def _compile_kernels(self, budgets: Sequence[Budget], forward: BoundForward) -> None:
        """Run the smallest and the largest budget, whose kernels compile in threads, unless they have run.

        The smallest comes first: kernels that it loads are there for the largest, where references take long. Errors
        come again later.
        """
        graphs = self._graphs
        if not graphs.arena.rows.is_cuda or not budgets:
            return
        with CAPTURE_LOCK, graphs.consensus.collective_try() as outcome, compiling_in_threads():
            ran = set() if forward.is_compiled else self._ran  # without torch's compiler
            for budget in sorted({min(budgets), max(budgets)} - ran):
                self._run_sample(budget, forward)
        outcome.take()

    def _choose_attention(self, budgets: Sequence[Budget]) -> None:
        """Time attention at the smallest and the largest budget, and at others until those around each tell its choice.

        Errors come again later.
        """
        graphs, ordered = self._graphs, sorted(budgets)
        if not graphs.arena.rows.is_cuda or not graphs.consensus.alone or len(ordered) < 3:
            return
        parts = [ordered[1:-1]]
        with CAPTURE_LOCK, graphs.consensus.collective_try() as outcome:
            for budget in ordered[0], ordered[-1]:
                self._time_attention(budget)
            while parts:
                part = parts.pop()
                middle = len(part) // 2
                if part and graphs.attention_around(part[middle]) is None:
                    self._time_attention(part[middle])
                    parts += [part[:middle], part[middle + 1 :]]
        outcome.take()

    def _attention_of(self, budget: Budget) -> list[str] | None:
        """Return the choices of attention at the budgets around, or timed now if these differ; `None` on the tape."""
        if not self._graphs.arena.rows.is_cuda:
            return None
        around = self._graphs.attention_around(budget)
        return self._time_attention(budget) if around is None else around

    def _time_attention(self, budget: Budget) -> list[str]:
        """Time attention in a run of a budget; return its choices."""
        forward, _ = self._captured
        with measuring() as attention:
            forward.guarded(partial(self._run_sample, budget, forward))
        self._graphs.attention[budget] = attention.choices
        return attention.choices

    def _capture_all(
        self,
        budgets: Sequence[Budget],
        others: Sequence[Budget],
        tried: list[Budget],
        capture: Callable[[Budget], Failure | None],
    ) -> None:
        """Capture budgets, and others while there is no graph; add each to those that were tried."""
        graphs = self._graphs
        first: Exception | None = None
        waiting, spare = deque(sorted(budgets, reverse=True)), deque(sorted(others, reverse=True))
        with Progress("capturing", len(waiting)) as progress:
            while waiting or (spare and not graphs):
                if first is None:
                    tried.append(budget := (waiting or spare).popleft())
                else:  # the smallest comes next
                    smallest = min(filter(None, (waiting, spare)), key=lambda queue: queue[-1])
                    tried.append(budget := smallest.pop())
                failure = capture(budget)
                progress.update()
                if failure is None:
                    graphs.failed.pop(budget, None)
                    if self._times is not None:
                        with graphs.consensus.collective_try() as outcome:
                            self._times.queue(budget)
                        outcome.take()  # the check replays it again
                    if first is not None:
                        forget_frames(first)
                        first = None
                    continue
                error, kind = failure
                del failure
                if kind == "memory":
                    forget_frames(error)
                    empty_cache(graphs.arena.rows.device)
                if kind == "declaration" or self._fallback is not None:
                    raise error
                graphs.failed[budget] = reason_of(error)
                if kind != "memory":  # the module does something else of so many rows, and others take their calls
                    graphs.split_is_right = False
                if kind != "memory" and not graphs:
                    if first is not None:
                        raise first from None
                    first = error
                del error
        if not graphs:
            raise first or CaptureError(
                f"no budget could be captured, because memory is short: {graphs.failed[min(tried)]}\n"
                "Give the encoder smaller budgets, or free memory first."
            )

    def _capture(self, memory: CapturedInputs, budget: Budget) -> Failure | None:
        """Capture a budget; return the failure, if there is one."""
        with CAPTURE_LOCK:
            if self._graphs.alike:
                failure = self._capture_alike(memory, budget)
                if failure is None or failure.kind == "memory":
                    return failure
            return self._capture_watched(memory, budget)

    def _capture_alike(self, memory: CapturedInputs, budget: Budget) -> Failure | None:
        """Capture a budget without a run, if it does what others did; if not, return a failure, and leave no graph.

        Kernels that no other budget needs are compiled or loaded in the capture.

        Raises:
            CaptureError: The capture failed, and something outside of the module keeps what it has not computed.
        """
        graphs, arena, (forward, _) = self._graphs, self._graphs.arena, self._captured
        form, name, graph = graphs.form, f"varlen_graphs {budget.rows} rows", None
        assert form is not None  # noqa: S101 - of the graphs that are there
        static = {tensor.untyped_storage().data_ptr() for tensor in (*arena.memory, *graphs.checks.memory)}
        known = KnownInputs(memory.device, memory.held.keys(), static)

        def run() -> list[Tensor]:
            arena.source.copy(budget.rows)
            parts = forward(*graphs.checks.view(arena, budget))
            form.check(parts)
            check_constants(parts.constants, graphs.constants or [])
            return outputs_of(parts)

        def watched() -> list[Tensor]:
            with nullcontext() if choices is None else repeating(choices):
                return known.watch(run)

        self._ran.add(budget)
        with graphs.consensus.collective_try() as outcome:
            choices = self._attention_of(budget)
            self._load_sample(budget)
            graph = self._backend.capture(watched, name)
            form.check_captured(graph.outputs)
        failure = outcome.take()
        if failure is not None:
            forget_frames(failure.error)
        kept = known.kept(() if graph is None else graph.outputs)
        if failure is None and graph is not None and not kept:
            graphs.add(budget, graph, self._fallback)
            return None
        if kept and graph is not None:
            self._load_sample(budget)
            graph.replay()  # computes what somebody goes on using
            move_from_pool(kept.values())  # where later graphs would write to it
        elif arena.rows.is_cuda and kept.keys() - forward.held():  # the tape computes what it records
            raise_changed_outside(self._original, NOT_COMPUTED)
        if kept:
            graphs.captured = None
            self._prepare_captured()
        failure = failure or Failure(OtherRunError("it keeps a tensor"), "other")
        graphs.alike = failure.kind == "memory" or isinstance(failure.error, NotRepeatedError)
        return failure

    def _capture_watched(self, memory: CapturedInputs, budget: Budget) -> Failure | None:
        """Capture a budget after a watched run of it; return the failure, if there is one.

        Another run comes ahead of that where torch's compiler or other ranks take part, and where runs have changed the
        module's shadow and there is no graph yet.
        """
        graphs, (forward, _) = self._graphs, self._captured
        arena, consensus = graphs.arena, graphs.consensus

        def run_once() -> Parts:
            return forward(*graphs.checks.view(arena, budget))

        def watch(memory: CapturedInputs) -> Parts:
            return forward.guarded(partial(memory.watch, run_once))

        def run() -> list[Tensor]:
            arena.source.copy(budget.rows)
            return outputs_of(run_once())

        with consensus.collective_try() as outcome:
            self._load_sample(budget)
            if self._warms_up or graphs.meets_compiler or not consensus.alone:
                with measuring(), consensus.dry_run():
                    forward.warm_up(*graphs.checks.view(arena, budget))
            if not consensus.alone:  # what no graph can hold must be found before other ranks wait for this one
                with consensus.dry_run():
                    watch(CapturedInputs(memory.device, "the module", memory.takes_constants))
        if outcome.failure is None:
            with consensus.collective_try() as outcome:
                with measuring() as attention:  # by which graphs have the fastest kernels for their size
                    parts = watch(memory)
                if forward.meets_compiler and not graphs.meets_compiler:  # what it compiles, no capture may
                    forward.warm_up(*graphs.checks.view(arena, budget))
                form = graphs.form or OutputForm(parts)
                form.check(parts)
                check_constants(parts.constants, graphs.constants or [])
                del parts
                keeps = bool(memory.alive())  # it has filled a cache, which the captured run finds filled
                if consensus.alone and keeps:
                    watch(memory)
                graphs.kept_outside = graphs.kept_outside or _kept_outside(memory, forward)
                memory.hold_state()
                graph = self._backend.capture(run, f"varlen_graphs {budget.rows} rows", memory.constants)
                form.check_captured(graph.outputs)
                if graphs.form is None:
                    graphs.form, graphs.per_square = form, attention.per_square
                    graphs.extents, graphs.rebuild = form.extents, form.rebuild
                graphs.meets_compiler = forward.meets_compiler
                is_ordinary = consensus.alone and not (keeps or memory.constants or graphs.meets_compiler)
                graphs.alike = is_ordinary and (graphs.alike or budget not in self._ran)
                graphs.attention[budget] = attention.choices
                graphs.add(budget, graph, self._fallback)
                self._warms_up = False
        if outcome.failure is not None:
            graphs.drop(budget)  # another rank has failed
            return outcome.take()
        return None


def _state_check(
    forward: Forward, bound: Callable[[Forward], BoundForward], arena: Arena, call: Call | None
) -> StateCheck:
    """Return a check by runs of a call, or of a sample if there is none."""

    def runs(forward: Forward) -> Run:
        def run(which: int) -> Parts:
            probe = arena.probes()[0] if which < ODD else arena.odd_probe()  # each with an item table of its own
            return bound(forward).run_probe(probe, which)

        return run

    def of_an_item(forward: Forward) -> Run:
        return partial(bound(forward).run_probe, arena.smallest_probe())

    return StateCheck(forward, runs if call is None else runs_of(call), of_an_item)


def _kept_outside(memory: CapturedInputs, forward: BoundForward) -> list[str]:
    """Describe what the watched run made and something keeps: neither the module nor a function beside it."""
    held = forward.held() if memory.alive() else set()

    def kept() -> list[str]:
        found = {address_of(tensor): describe(tensor) for tensor in memory.alive()}
        return [what for address, what in found.items() if address not in held]

    if kept():
        gc.collect()  # nobody keeps what only a cycle refers to
    return kept()


def reason_of(error: BaseException) -> str:
    """Return the error and its line, in one line."""
    what, *rest = str(error).splitlines() or [""]
    where = next((line for line in rest if line.startswith("  at ")), "")
    kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
    return shorten(f"{kind}{what}{where}", 400)
