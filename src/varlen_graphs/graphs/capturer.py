"""Capture sets of graphs, time them, and watch what they depend on."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.consensus import Consensus
from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.capture.mode import Mode
from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.static_args import StaticKey, static_key
from varlen_graphs.errors import BudgetError, SpecError, VerificationError, warn
from varlen_graphs.graphs.allowance import Allowance
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.bound_forward import BoundForward
from varlen_graphs.graphs.cached_state import Run, StateCheck, runs_of
from varlen_graphs.graphs.calibrate import measure
from varlen_graphs.graphs.dependencies import Dependencies
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.gpu_checks import GpuChecks
from varlen_graphs.graphs.graph_set import GraphSet, reason_of
from varlen_graphs.outputs.parts import Parts, SizeError
from varlen_graphs.routing.enabled import CAPTURE_FAILED, EnabledBudgets
from varlen_graphs.watch.shadow import Shadow
from varlen_graphs.watch.sharded import mesh_of

MANY_KEYS = 8
"""Number of sets of static arguments at which a warning tells their price."""

MOST_SETS = 16
"""Number of sets of static arguments and adapters that calls capture; `encoder.capture(...)` captures any."""

PER_CALL = "declare what changes from call to call by inputs=[vg.inputs.PerCall(...)] of the BufferSpec"

TOO_MANY_SETS = "more sets of static arguments than calls capture"

Key = tuple[StaticKey, Hashable]
"""Key of a set of graphs: static arguments, and the active adapters."""

Size = tuple[Key, Budget]
"""The size at which a call runs eager, and the key of the graphs that it uses."""


Prove = Callable[[GraphSet, "CaptureInputs", Sequence[Budget], StateCheck, Call | None], None]
"""Compares new graphs of these budgets with eager runs on a shadow, on rows of a call, and refuses wrong ones."""


class CaptureInputs(NamedTuple):
    """Inputs that a set of graphs is captured for, with any adapters."""

    static_args: dict[str, Any]
    row_shape: tuple[int, ...]
    device: torch.device


class Capturer:
    """Captures sets of graphs over one arena.

    Args:
        forward: The forward to capture.
        mode: The mode to capture in.
        pool: The pool to capture into.
        budgets: The budgets. It learns costs, and disables budgets that cannot be captured.

    Attributes:
        sets: The set of graphs of each key, one a budget.
        exact: Beside them, graphs for calls of exactly their size, each in a set of its own.
        inputs: The inputs that each set was captured for.
        arenas: Static inputs of graphs by the shape of a row: one, unless items of a batch have several.
        checks: Validates layouts on the GPU; kept when graphs are dropped.
        dependencies: Watches what the graphs depend on.
        consensus: Consensus with other ranks that capture the module.
        prove: Proves new graphs; `None` trusts them.
        seconds: Duration of each part of the first captures.
        failure: Reason why the last capture gave no graph at all, if it did not.
    """

    def __init__(self, forward: Forward, mode: Mode, pool: Pool, budgets: EnabledBudgets) -> None:
        self.sets: dict[Key, GraphSet] = {}
        self.exact: dict[Size, GraphSet] = {}
        self.inputs: dict[Key, CaptureInputs] = {}
        self.arenas: dict[tuple[int, ...], Arena] = {}
        self.checks: GpuChecks | None = None
        self.dependencies = Dependencies(forward)
        self.consensus = Consensus()
        self.prove: Prove | None = None
        self.seconds: dict[str, float] = {}
        self.failure: str | None = None
        self._allowance: Allowance | None = None
        self._written: dict[Key, set[int]] = {}  # addresses of what runs of the module write to
        self._compiled: dict[Key, tuple[BoundForward, Shadow]] = {}
        self._warned_of_sets = False
        self._forward = forward
        self._mode = mode
        self._pool = pool
        self._budgets = budgets

    def capture(
        self,
        key: Key,
        inputs: CaptureInputs,
        budgets: Sequence[Budget],
        spare: Sequence[Budget] = (),
        fallback_budget: Budget | None = None,
        call: Call | None = None,
    ) -> None:
        """Capture these budgets, which have no graph yet; spare ones if none of them can be captured.

        All runs are those of shadows of the module, on the call that needs the graphs if there is one.

        With the budget that calls use without it, capture instead one graph of exactly their size. It lies beside those
        of the budgets, and is neither timed nor disabled.
        """
        static_args, row_shape, device = inputs
        backend = self._mode.backend(device)
        assert backend is not None  # noqa: S101 - calls run eager without one
        self._check_agreement()
        self._mode.warn_of_training()
        attributes, spec = self.dependencies.attributes, self._forward.spec
        with (
            self._pool.capturing(type(self._forward.module).__name__),
            torch.inference_mode(False),
            torch.no_grad(),
            on_device(device),
        ):
            start, is_new, is_first = time.perf_counter(), key not in self.sets, not self.sets
            if self.checks is None or self.checks.device != device:
                self.checks = GpuChecks(spec, device)
            arena = self._arena(row_shape, device)
            graphs = None if fallback_budget else self.sets.get(key)
            if self._allowance is None:
                self._allowance = Allowance(device)
            graphs = graphs or GraphSet(
                arena, self.checks, self.consensus, timed=is_first, fallback_budget=fallback_budget,
                defaults=self._budgets.defaults, allowance=None if fallback_budget else self._allowance,
            )  # fmt: skip
            try:
                check = self._check(arena, static_args, call)
                if not len(graphs):  # later graphs of a set go by what its first ones have shown
                    check = self._begun(check, arena, static_args, call, max(budgets))
                    self._written[key] = self._written.get(key, set()) | check.written
                forward, shadow = self._to_capture(key, static_args)
                budgets = graphs.capture(budgets, forward, backend, spare)
            except Exception as error:
                self.failure = reason_of(error) if is_first else self.failure
                raise
            self.failure = None
            if is_first:
                self._mode.hold_settings()
            if fallback_budget:
                self.exact[key, budgets[0]] = graphs
            else:
                self.sets[key], self.inputs[key] = graphs, inputs
            if arena not in self.arenas.values():
                self.arenas = {**self.arenas, row_shape: arena}  # another thread may be reading them
            with _dropped_on_error(graphs, budgets):
                attributes.drop_changed(shadow)
                graphs.own |= shadow.own()
                seconds = forward.compile_seconds
                del forward, shadow  # what it keeps of a capture goes; what graphs read is held
                self.dependencies.watch([*self.sets.values(), *self.exact.values()], attributes)
                failed = {} if fallback_budget else self._disable_failed(graphs, budgets)
                self._budgets.leave_out(graphs.left_out)
                graphs.left_out = {}
                if graphs.timed:
                    self.seconds = {} if is_first else self.seconds
                    compiles = device.type == "cuda"  # the tape has no kernels
                    self._count_seconds("captured, kernels compiled, in" if compiles else "captured in", start)
                    if is_first and seconds is not None:
                        self.seconds["torch.compile took of that"] = seconds
                if self.prove is not None:
                    start = time.perf_counter()
                    self.prove(graphs, inputs, [budget for budget in budgets if budget in graphs], check, call)
                    self._count_seconds("proven in", start)
            if graphs.timed:
                self._time(
                    graphs, [budget for budget in budgets if budget in graphs], check.forward, static_args, is_first
                )
        for budget, reason in failed.items():  # last, because a warning may be an error
            warn(
                f"the graph of {budget.rows} rows could not be captured, and the budget is disabled: other budgets "
                f"take its calls, and what none of them holds runs eager; {reason}"
            )
        if is_new and len(self.sets) == MANY_KEYS:
            warn(
                f"{len(self.sets)} sets of static arguments were captured, the last with {static_args}: each takes "
                "time and memory; "
                f"{self._forward.spec.advice(PER_CALL, 'pass the same values, or round them to a few')}"
            )

    def why_not(self, key: Key, static_args: dict[str, Any]) -> str | None:
        """Return the reason why calls of this key capture nothing, and warn of it once; `None` if they may."""
        if key in self.sets or len(self.sets) < MOST_SETS:
            return None
        if not self._warned_of_sets:
            self._warned_of_sets = True
            warn(
                f"{len(self.sets)} sets of static arguments have graphs, and {type(self._forward.module).__name__} was "
                f"called with another one: {self._what_varies(static_args)}. Such calls run eager, because each set "
                f"takes time and memory; {self._forward.spec.advice(f'{PER_CALL}, or round it', 'round it')} to a few "
                "values; encoder.capture(...) captures any set that calls should find"
            )
        return TOO_MANY_SETS

    def _what_varies(self, static_args: dict[str, Any]) -> str:
        """Describe the static argument with the most values so far."""
        captured = [inputs.static_args for inputs in self.inputs.values()]
        values = {
            name: {static_key({name: own[name]}) for own in captured if name in own and name in static_args}
            for name in sorted(static_args)
        }
        name = max(values, key=lambda name: len(values[name]), default=None)
        if name is None or len(values[name]) < 2:
            return "its adapters, or the shape of its rows, changed"
        return f"{name}={quoted(static_args[name])}, after {len(values[name])} other values"

    def _arena(self, row_shape: tuple[int, ...], device: torch.device) -> Arena:
        """Return the arena for rows of a shape, a new one if need be. All rows but those of a batch fit the first."""
        spec, dtype = self._forward.spec, self._forward.row_dtype
        arena = self.arenas.get(row_shape) if spec.layout.one_row else next(iter(self.arenas.values()), None)
        if arena is None:
            inputs = [self._forward.input_dtype(one) for one in spec.inputs]
            try:
                arena = Arena(spec, self._budgets.enabled, row_shape, dtype, device, inputs)
            except (RuntimeError, MemoryError) as error:
                if device.type == "cuda" or not is_out_of_memory(error):
                    raise
                largest = max(self._budgets.enabled)
                raise BudgetError(
                    f"no memory for the inputs of the largest budget, {largest} ({reason_of(error)}): expected budgets "
                    "for which there is memory; take the largest call that comes as the largest one"
                ) from error
            # Torch reuses pinned memory at once that it has not copied from itself, also after a capture that failed.
            weakref.finalize(arena, self._pool.synchronize).atexit = False
        return arena

    def check_not_loading(self) -> None:
        """Check that no host buffer is being computed for a call, whose items a capture would overwrite.

        Raises:
            InputError: One is.
        """
        for arena in self.arenas.values():
            if arena.loading:
                arena.raise_loading()

    def own_bytes(self) -> dict[Budget, int]:
        """Return the bytes that the graphs of each budget take beside shared memory."""
        own: Counter[Budget] = Counter()
        for graphs in self.sets.values():
            own.update(graphs.bytes())
        return dict(own)

    def exact_bytes(self) -> int:
        """Return the bytes that graphs for calls of exactly their size take beside shared memory."""
        return sum(sum(graphs.bytes().values()) for graphs in self.exact.values())

    def bytes(self) -> int:
        """Return the bytes that graphs and arenas hold, without the pool."""
        arenas = sum(tensor.nbytes for arena in self.arenas.values() for tensor in arena.memory)
        return arenas + sum(self.own_bytes().values()) + self.exact_bytes()

    def drop_exact(self, sizes: Collection[Size]) -> None:
        """Drop graphs for calls of exactly these sizes, once they have run."""
        self._pool.synchronize()
        for key, size in sizes:
            self.exact.pop((key, size)).drop(size)

    def forget(self) -> None:
        """Drop all graphs and the arena."""
        for graphs in (*self.sets.values(), *self.exact.values()):
            graphs.clear()  # whoever still has them does not keep the memory
        self.sets.clear()
        self.exact.clear()
        self.inputs.clear()
        self.arenas = {}
        self._written.clear()
        self._compiled.clear()
        self._allowance = None
        self.dependencies.forget()
        self._mode.forget_settings()

    def _to_capture(self, key: Key, static_args: dict[str, Any]) -> tuple[BoundForward, Shadow]:
        """Return the forward to capture, and its shadow: one for all budgets if torch's compiler has to see it.

        The shadow shares what no run writes, so that graphs follow the module where that is changed in place.
        """
        if (found := self._compiled.get(key)) is not None:
            return found
        shadow = Shadow(self._forward.module, self._written[key])
        made = BoundForward(self._forward.on(shadow), static_args, self._mode), shadow
        if self._forward.compiled is not None:
            self._compiled[key] = made
        return made

    def _check(self, arena: Arena, static_args: dict[str, Any], call: Call | None) -> StateCheck:
        """Return a check by runs of a call, or of a synthetic item if there is none."""

        def runs(forward: Forward) -> Run:
            bound = BoundForward(forward, static_args, self._mode)
            return lambda which: bound.run_probe(arena.probes()[0], which)  # each with an item table of its own

        def of_an_item(forward: Forward) -> Parts:
            return BoundForward(forward, static_args, self._mode).run_probe(arena.smallest_probe(), which=2)

        return StateCheck(self._forward, runs if call is None else runs_of(call), of_an_item)

    def _begun(
        self, check: StateCheck, arena: Arena, static_args: dict[str, Any], call: Call | None, budget: Budget
    ) -> StateCheck:
        """Begin a check of what the module keeps; one of a synthetic item where the forward takes no such call.

        A host buffer may call another encoder, which no run of a capture may.
        """

        def at_capacity(forward: Forward) -> None:
            arena.load_sample(budget)
            assert self.checks is not None  # noqa: S101 - made ahead
            BoundForward(forward, static_args, self._mode).run_probe(self.checks.view(arena, budget), which=2)

        is_bounded = budget not in self._budgets.defaults  # the allowance is for runs of others
        autocast = self._mode.autocast(arena.rows.device.type)
        with self.consensus.collective_try() as outcome, self.consensus.dry_run(), autocast:
            try:
                check.begin(at_capacity if is_bounded else None, is_first=call is None)
            except SizeError as error:
                shadow = Shadow(self._forward.module)
                raise BoundForward(self._forward.on(shadow), static_args, self._mode).explained(arena, error) from error
        if (failure := outcome.take()) is not None:
            if call is None:
                raise failure.error
            synthetic = self._check(arena, static_args, None)
            return self._begun(synthetic, arena, static_args, None, budget)
        return check

    def _time(
        self, graphs: GraphSet, budgets: Sequence[Budget], forward: Forward, static_args: dict[str, Any], is_first: bool
    ) -> None:
        """Time replays of budgets whose costs are not known from an earlier run."""
        before = self._budgets.known
        budgets = [budget for budget in budgets if budget not in before]
        if budgets and graphs.arena.rows.is_cuda:
            start = time.perf_counter()
            known = None if is_first and not before else self._budgets.measured
            held = self._pool.bytes()
            replayed = self.prove is not None
            self._budgets.learn(measure(graphs, forward, budgets, static_args, held, self.consensus, known, replayed))
            self._count_seconds("budgets timed in", start)
        if (measured := self.consensus.same(self._budgets.measured)) is not None:
            self._budgets.learn(measured)

    def _count_seconds(self, part: str, start: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def _disable_failed(self, graphs: GraphSet, budgets: Sequence[Budget]) -> dict[Budget, str]:
        """Disable those of these budgets whose capture failed, and return them with the reasons."""
        failed = {budget: reason for budget, reason in graphs.failed.items() if budget in budgets}
        for budget, reason in failed.items():
            self._budgets.disable(budget, CAPTURE_FAILED, reason)
        return failed

    def _check_agreement(self) -> None:
        module = self._forward.module
        mesh = mesh_of(module)
        if mesh is not None and mesh.size() > 1 and self.consensus.alone:
            raise SpecError(
                f"the weights of {type(module).__name__} are sharded over {mesh.size()} ranks, which must capture and "
                "replay alike: make calls through vg.parallel.TensorParallelEncoder(encoder)"
            )


@contextmanager
def _dropped_on_error(graphs: GraphSet, budgets: Sequence[Budget]) -> Iterator[None]:
    """Drop the graphs of budgets if an error or an interrupt leaves them unproven. A failed proof has refused them."""
    try:
        yield
    except VerificationError:
        raise
    except BaseException:
        for budget in budgets:
            graphs.drop(budget)
        raise
