"""The proof of new graphs: replays over NaN and over other values, compared with the module itself."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from varlen_graphs.capture.mode import Mode
from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import CaptureError, SpecError, VerificationError, counted, warn
from varlen_graphs.graphs.cached_state import StateCheck
from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.forward import DECLARATION, MODULE, Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.output_form import check_constants
from varlen_graphs.kernels.operator import references
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.compare import MOST_NAN, Expected, limit_of, nan_shares
from varlen_graphs.verify.eager_proof import check_eager, check_left_out, check_lengths, evidence_of, in_two
from varlen_graphs.verify.made_up_calls import Kind, Numbers, has_floats, has_integers, make_calls
from varlen_graphs.verify.made_up_layouts import (
    crowded_layouts,
    even_layouts,
    rich_layouts,
    single_layouts,
    uneven_layouts,
)
from varlen_graphs.verify.options import Verify
from varlen_graphs.verify.tasks import Task, tasks_of_a_set, tasks_of_each
from varlen_graphs.verify.trial import Example, Trial
from varlen_graphs.watch.made_up_run import MadeUpRun, run_made_up

BLIND = (
    "all floating outputs are NaN for all made-up rows, which shows nothing; pass verify=vg.Verify(prove=False), and "
    "prove graphs on your own calls with encoder.verify(calls)"
)

FEW_ROWS = (
    "Only calls with an item of fewer than {0} rows were wrong. If the module needs that many of each, declare "
    "BufferSpec(..., min_rows={0}): calls with smaller ones run eager."
)


MOST_SECONDS = 3.0
"""Seconds that an eager run may take which shows what the replays of graphs do not; there are up to twenty."""


class _NanError(VerificationError):
    """Raised if a module returns nothing but NaN for made-up rows."""


class Prover:
    """Proves new graphs of an encoder before calls use them.

    Every graph replays a few small items; one of the exact size of calls no more. Of another new set the largest graph
    replays items of several sizes and numbers of frames (and the longest item that it holds, if an attention mask is
    declared), the smallest one that holds these all and some of them in another order, and the smallest one the edges
    of its budget. Each is replayed with NaN in the pool and in all padding, and with other values. Outputs must equal
    those of the module itself, run eager without padding, or of the declared forward where all of a budget is used up,
    and must not change with the padding. A graph that fails is refused: its calls run eager. If all graphs of a new set
    fail, all budgets are refused. The declared forward also runs eager, on items that may be more and larger than those
    of graphs, of other magnitudes, and without what calls may leave out.

    Where the module cannot run with the arguments of a call, because it needs the declared buffers, the declared
    forward runs in its place, with the references of all kernels.

    Args:
        forward: The forward of the encoder.
        mode: The mode that graphs hold for.
        pool: The pool of the graphs.
        budgets: The budgets.
        options: `strict` and `tolerance`.
    """

    def __init__(self, forward: Forward, mode: Mode, pool: Pool, budgets: EnabledBudgets, options: Verify) -> None:
        self._forward = forward
        self._spec = forward.spec
        self._mode = mode
        self._pool = pool
        self._budgets = budgets
        self._options = options
        self._numbers: list[Numbers] = ["normal", "between 0 and 1", "above 1"] if has_floats(forward) else ["normal"]
        self._seconds_per_row = 0.0  # of the runs so far, at least; 0 before there are any
        self._takes_first = False  # True once the module took numbers of the first range

    def __call__(self, graphs: GraphSet, inputs: CaptureInputs, budgets: Sequence[Budget], check: StateCheck) -> None:
        """Prove the graphs of these budgets, and refuse those that fail. Syncs; leaves NaN in the padding.

        Eager runs are those of the check, on its shadow of the module; in the end they must have changed no output.

        Raises:
            VerificationError: A graph failed, with `strict`.
            SpecError: The declaration does not match the module.
        """
        if not budgets:
            return
        self._forward = check.forward
        is_new = len(graphs) == len(budgets) and graphs.stand_in is None
        with self._mode.autocast(inputs.device.type), self._live_memory_restored():
            prove = partial(self._failures, graphs, inputs, self._pool.memory(), known := dict[Layout, Example]())
            tasks = tasks_of_each(self._spec, budgets)
            for_all = tasks_of_a_set(self._spec, budgets) if is_new else []
            richer = {task.budget for task in for_all if task.must_run}  # what these replay stands in for small items
            failures = prove([*for_all, *(task for task in tasks if task.budget not in richer)])
            failed = richer & {task.budget for task, _ in failures}
            failures += prove([task for task in tasks if task.budget in failed])
            refused = {task.budget: why for task, why in failures if task in tasks}
            whole = [why for task, why in failures if task.budget not in refused]
            right = [budget for budget in budgets if budget not in refused]
            if not whole and right and any(task.budget in refused for task in for_all):  # those showed nothing
                whole = [why for _, why in prove(tasks_of_a_set(self._spec, right))]
            if not whole and right and is_new:
                whole = self._evidence_eager(graphs, inputs, known)
            if is_new:
                whole = [*whole, *self._evidence_of_state(graphs, check)]
            if is_new and not right:
                whole = whole or [*refused.values()]
            if whole:
                refused |= dict.fromkeys(self._budgets.enabled, whole[0])
        graphs.against |= {example.against for example in known.values()}
        count = len(graphs)
        for budget, failure in refused.items():
            graphs.refuse(budget, failure)
        if (proven := self._forward.verdict.proven) is not None and graphs.stand_in is None:
            key = self._spec.key(inputs.statics, inputs.row_shape)
            proven[key] = proven.get(key, True) and not refused
        if refused:
            self._report(refused, max(count, len(refused)))

    def _evidence_eager(self, graphs: GraphSet, inputs: CaptureInputs, known: dict[Layout, Example]) -> list[str]:
        """Return the evidence that the declaration is wrong whatever graphs hold, or nothing."""
        spec, forward, limit = self._spec, self._forward, self._limit(inputs.device)
        right = partial(check_eager, forward, limit=limit)

        def in_parts(example: Example) -> None:
            right(example, parts=in_two(example.layout, spec.row_multiple))

        checks: list[tuple[Iterable[Layout], Callable[[Example], None], Kind]] = [
            (rich_layouts(spec, max(self._budgets.enabled)), right, "random"),
            (crowded_layouts(spec), in_parts, "random"),
            (uneven_layouts(spec), in_parts, "uneven"),
        ]
        if has_integers(forward):
            checks.append((even_layouts(spec), right, "repeated"))
        if forward.may_leave_out:
            checks.append((even_layouts(spec), partial(check_left_out, forward, limit=limit), "random"))
        for layouts, check, kind in checks:
            layouts, too_long = self._affordable([*layouts], graphs)
            if not layouts and too_long is not None:
                graphs.unproven.add(too_long)
                continue
            with graphs.agreement.attempt() as attempt:
                own = known if kind == "random" else {}
                itself = kind != "uneven"  # whose items are compared with each other
                check(self._example(layouts, graphs, inputs, own, by_module=itself, kind=kind, itself=itself))
            if (evidence := evidence_of(attempt.take())) is not None:
                return [evidence]
        with graphs.agreement.attempt() as attempt:
            lengths = single_layouts(spec, max(self._budgets.enabled)) if spec.counts_rows else ()
            make = partial(make_calls, inputs=inputs, numbers=self._numbers[0])
            check_lengths(forward, (next(make(forward, layout)) for layout in lengths))
        evidence = evidence_of(attempt.take())
        return [] if evidence is None else [evidence]

    def _evidence_of_state(self, graphs: GraphSet, check: StateCheck) -> list[str]:
        """Return the evidence that outputs depend on earlier runs, or nothing."""
        with graphs.agreement.attempt() as attempt, graphs.agreement.rehearsal():  # as the check began
            if (why := check.find_evidence()) is not None:
                raise VerificationError(why)
        graphs.kept = check.kept
        failure = attempt.take()
        if failure is not None and isinstance(failure.error, CaptureError):
            raise failure.error
        evidence = evidence_of(failure)
        return [] if evidence is None else [evidence]

    def _affordable(self, layouts: Sequence[Layout], graphs: GraphSet) -> tuple[Sequence[Layout], str | None]:
        """Return the layouts an eager run of which does not take too long, and what the shortest is if none does not.

        Ranks, whose clocks differ, take all.
        """
        rate = self._seconds_per_row if graphs.agreement.alone else 0.0
        affordable = [layout for layout in layouts if layout.size * rate <= MOST_SECONDS]
        if affordable or not layouts:
            return affordable, None
        rows = min(layout.size for layout in layouts)
        return (), f"{counted(rows, 'row')} at a time, an eager run of which takes some {rows * rate:.0f} s"

    def _report(self, refused: dict[Budget, str], graphs: int) -> None:
        message = (
            f"{type(self._forward.module).__name__}: {len(refused)} of {graphs} graphs failed the proof at their "
            f"capture and are not used: their calls use others, or run eager.\n{next(iter(refused.values()))}"
        )
        if self._options.strict:
            raise VerificationError(message)
        warn(message)

    def _failures(
        self,
        graphs: GraphSet,
        inputs: CaptureInputs,
        pool: list[Tensor],
        known: dict[Layout, Example],
        tasks: Sequence[Task],
    ) -> list[tuple[Task, str]]:
        """Return the tasks in which a graph is wrong, and why."""
        failures, taken, trials = list[tuple[Task, str]](), list[Task](), list[Trial]()
        limit = self._limit(inputs.device)
        for task in tasks:
            with graphs.agreement.attempt() as attempt:
                own = known if task.itself else dict[Layout, Example]()
                example = self._example(task.layouts, graphs, inputs, own, itself=task.itself)
            if (failure := attempt.take()) is None:
                taken.append(task)
                trials.append(Trial(self._forward, graphs, task.budget, pool, example, limit, task.reorder))
                with graphs.agreement.attempt() as attempt:
                    trials[-1].check_indices()
                if (failure := attempt.take()) is not None:
                    failures.append(
                        (task, f"{task.budget}: a replay would fail, as its forward does: {failure.error!r}")
                    )
                    del taken[-1], trials[-1]
            elif isinstance(failure.error, SpecError):
                raise failure.error
            elif task.must_run:
                failures.append(
                    (task, f"{task.budget} could not be proven, because made-up calls fail: {failure.error}")
                )
        right = [False] * len(trials)
        with graphs.agreement.attempt() as attempt:  # operators may refuse NaN
            verdicts = [trial.run() for trial in trials]  # all are queued before the first one is read
            right = torch.stack(verdicts).tolist() if verdicts else right
        attempt.take()
        smallest_right = 0
        wrong = list[tuple[Task, Trial]]()
        for task, trial, is_right in zip(taken, trials, right, strict=True):
            with graphs.agreement.attempt() as attempt:
                if not is_right:
                    raise VerificationError(f"wrong in {task.budget}")
            if attempt.take() is None:
                least = min(trial.example.layout.rows)
                smallest_right = min(smallest_right or least, least)
            else:
                wrong.append((task, trial))
        only_small = all(min(trial.example.layout.rows) < smallest_right for _, trial in wrong)
        few = self._spec.advice(FEW_ROWS, FEW_ROWS.partition(" If")[0])
        hint = f"\n{few.format(smallest_right)}" if only_small and not self._spec.batched else ""
        for task, trial in wrong:
            with graphs.agreement.attempt() as attempt:
                trial.find_evidence()
            if (failure := attempt.take()) is None:
                continue
            if task.must_run or not graphs.agreement.alone or trial.reference_repeats():
                failures.append((task, f"{failure.error}{hint}"))
        return failures

    def _limit(self, device: torch.device) -> float:
        return limit_of(self._options.tolerance, self._forward, device)

    @contextmanager
    def _live_memory_restored(self) -> Iterator[None]:
        """Save what tensors of the pool hold, which others may need, because the proof overwrites the whole pool."""
        live = self._pool.memory(live=True)
        saved = [memory.clone() for memory in live]
        try:
            yield
        finally:
            for memory, before in zip(live, saved, strict=True):
                memory.copy_(before)

    def _example(
        self,
        layouts: Iterable[Layout],
        graphs: GraphSet,
        inputs: CaptureInputs,
        known: dict[Layout, Example],
        by_module: bool = False,
        kind: Kind = "random",
        itself: bool = True,
    ) -> Example:
        """Return a call of the first layout that the declared forward takes; `by_module` one that both take.

        Its rows are of a kind, see `make_calls`, and so that the output is not NaN, if that can be: any NaN equals it.

        Raises:
            SpecError: The output holds other Python values than those that graphs return.
            Exception: The error of the first layout, if the forward takes none.
        """
        layouts, first = [*layouts], None
        declared: Example | None = None
        blind: Example | None = None  # some output of it is NaN, but not all are
        for numbers in [*self._numbers]:
            for layout in layouts:
                calls = make_calls(self._forward, layout, inputs, kind, numbers)
                attempt = partial(self._try, itself=itself, alone=kind == "uneven")
                tries = iter([known[layout]]) if layout in known else map(attempt, calls)
                for tried in tries:
                    if isinstance(tried, Exception):
                        first = first or tried
                        continue
                    check_constants(tried.output.constants, graphs.constants or [])
                    worst, best = nan_shares(tried.output.tensors)
                    if layout not in known and worst > MOST_NAN:
                        first = first if isinstance(first, _NanError) else _NanError(BLIND)
                        blind = blind or (tried if best <= MOST_NAN else None)
                    elif by_module and tried.against == DECLARATION and self._forward.answers_itself(tried.call):
                        declared = declared or tried
                    else:
                        known[layout] = tried
                        self._numbers = sorted(self._numbers, key=lambda one: one != numbers)
                        self._takes_first = True
                        return tried
            if declared is not None or (self._takes_first and not isinstance(first, _NanError)):
                break  # what the module refuses is not the numbers
        if (other := declared or blind) is None:
            raise first or LookupError("there is no layout to try")
        known[other.layout] = other
        return other

    def _try(self, call: Call, itself: bool, alone: bool = False) -> Example | Exception:
        """Return a call with the output of the module itself, or of the forward if it cannot run with these arguments.

        Without `itself`, of the forward in any case: with the references of all kernels, unless nothing but the forward
        is compared with it `alone`.

        The forward runs in any case: what it refuses eager, no graph may do. Returns the error of the module, or of a
        function in the declaration.
        """
        try:
            layout, own = read_layout(self._spec, call), None
            run = partial(run_made_up, device=call.rows.device, mode=(mode := MadeUpRun()))
            if itself and self._forward.answers_itself(call):
                with suppress(Exception), self._timed(layout.size):  # it may need more than these arguments
                    own = Expected(run(partial(self._forward.answer, call)), layout, call.padded)
            by_references = own is None and not alone
            with references() if by_references else nullcontext(), self._timed(layout.size):
                output = run(partial(self._forward.exact, call))
            form = flatten(output, self._spec.declared)
            against = DECLARATION if own is None and not self._forward.is_module else MODULE
            own = own or Expected(output, layout, call.padded)
            return Example(call, layout, own, against, form, by_references, mode.has_indices)
        except Exception as error:
            return error

    @contextmanager
    def _timed(self, rows: int) -> Iterator[None]:
        """Note how long a run of so many rows takes."""
        start = time.perf_counter()
        yield
        own = (time.perf_counter() - start) / rows
        self._seconds_per_row = min(own, self._seconds_per_row or own)
