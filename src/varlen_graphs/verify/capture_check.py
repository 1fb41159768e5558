"""The check of new graphs at their capture: examples replayed over NaN and over other values, before calls use them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import AttentionMask
from varlen_graphs.capture.agreement import Failure
from varlen_graphs.capture.pool import Pool
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import CaptureError, SpecError, VerificationError, warn
from varlen_graphs.graphs.cached_state import StateCheck
from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.layouts.items import Layout
from varlen_graphs.options.verify import Verify
from varlen_graphs.routing.packing import Pack
from varlen_graphs.serving.execute import Executor
from varlen_graphs.verify import synthetic_layouts as layouts
from varlen_graphs.verify.disagreement import Replays
from varlen_graphs.verify.eager_checks import check_eager, check_in_parts, check_left_out, check_lengths
from varlen_graphs.verify.error_locator import ErrorLocator
from varlen_graphs.verify.samples import SampleRun, Samples
from varlen_graphs.verify.synthetic_calls import Kind

FEW_ROWS = (
    "Only calls with an item of fewer than {0} rows were wrong. If the module needs that many of each, declare "
    "BufferSpec(..., min_rows={0}): calls with smaller ones run eager."
)


class Case(NamedTuple):
    """Items for one graph to replay.

    Attributes:
        budget: The budget of the graph.
        layouts: Items; it replays the first ones that the module takes.
        reorder: If True, also some of them in another order.
        must_run: If False, the module may refuse them all.
        itself: If False, the declared forward tells what is right, not the module itself: they differ, if they do, in
            smaller layouts too, and modules may run many segments one by one.
    """

    budget: Budget
    layouts: Iterable[Layout]
    reorder: bool = False
    must_run: bool = True
    itself: bool = True

    @classmethod
    def of_each(cls, spec: BufferSpec, budgets: Sequence[Budget]) -> list["Case"]:
        """Return what every graph replays, the largest first."""
        return [cls(budget, layouts.small(spec, budget)) for budget in sorted(budgets, reverse=True)]

    @classmethod
    def of_a_set(cls, spec: BufferSpec, budgets: Sequence[Budget]) -> list["Case"]:
        """Return what the graphs of a new set replay in addition: what fails there concerns all of its budgets.

        Edges are those of the smallest budget, and orders those of the smallest one that holds the mixed items: what is
        wrong there is so in every graph, and replays of these are short. The longest item is that of the largest one.
        """
        smallest, largest = min(budgets), max(budgets)
        mixed = spec.needs.load(next(layouts.mixed(spec, largest)))
        ordered = min(budget for budget in budgets if budget.holds(*mixed) or budget is largest)
        cases = [cls(budget, layouts.mixed(spec, budget), budget is ordered) for budget in {largest: 0, ordered: 0}]
        cases += [cls(smallest, [one], must_run=False) for one in layouts.edges(spec, smallest)]
        cases += [cls(smallest, [one], must_run=False, itself=False) for one in layouts.full(spec, smallest)]
        if any(isinstance(buffer, AttentionMask) for buffer in spec.buffers):  # short items show no window
            cases += [cls(largest, [one], must_run=False) for one in layouts.longest(spec, largest)]
        return cases


def check_graphs(
    executor: Executor,
    options: Verify,
    graphs: GraphSet,
    inputs: CaptureInputs,
    budgets: Sequence[Budget],
    check: StateCheck,
    call: Call | None,
) -> None:
    """Check the graphs of these budgets before calls use them, and reject those that fail. Syncs.

    Examples are made of the rows of the call that needs the graphs. Every graph replays a few small items; one of the
    exact size of calls no more. Of another new set the largest graph replays items of several sizes and numbers of
    frames, the smallest one that holds these all and some of them in another order, and the smallest one the edges of
    its budget. Each is replayed with NaN in the pool and in all padding, and with other values. Outputs must equal
    those of the module itself, run eager without padding, or of the declared forward where all of a budget is used up,
    and must not change with the padding. The declared forward also runs eager, on items that may be more and larger
    than those of graphs, of other magnitudes, and without what calls may leave out. If all graphs of a new set fail,
    all budgets are rejected. Where the module cannot run with the arguments of a call, because it needs the declared
    buffers, the declared forward runs in its place, with the references of all kernels.

    Eager runs are those of the check of state, on its shadow of the module; in the end they must have changed no
    output. Leaves NaN in the padding.

    Raises:
        VerificationError: A graph failed, with `strict`.
        SpecError: The declaration does not match the module.
    """
    if not budgets:
        return
    forward, spec, fallback_budget = check.forward, executor.spec, graphs.fallback_budget
    is_new = len(graphs) == len(budgets) and fallback_budget is None
    with executor.mode.autocast(inputs.device.type), _live_memory_restored(executor.pool):
        samples = Samples(forward, inputs, call, graphs.constants or [])
        replays = Replays(executor, forward, options.tolerance, inputs.device)
        failing = partial(_failing, replays, samples, graphs, forward)
        cases = Case.of_each(spec, budgets)
        for_all = Case.of_a_set(spec, budgets) if is_new else []
        richer = {case.budget for case in for_all if case.must_run}  # what these replay stands in for small items
        failures = failing([*for_all, *(case for case in cases if case.budget not in richer)])
        failed = richer & {case.budget for case, _ in failures}
        failures += failing([case for case in cases if case.budget in failed])
        rejected = {case.budget: why for case, why in failures if case in cases}
        whole = [why for case, why in failures if case.budget not in rejected]
        right = [budget for budget in budgets if budget not in rejected]
        if not whole and right and any(case.budget in rejected for case in for_all):  # those showed nothing
            whole = [why for _, why in failing(Case.of_a_set(spec, right))]
        if is_new and not whole and right:
            whole = _wrong_eager(forward, samples, graphs, max(executor.store.budgets.enabled), replays.limit)
        if is_new:
            whole += _depends_on_state(graphs, check)
            whole = whole or ([] if right else [*rejected.values()])
        if whole:
            rejected |= dict.fromkeys(executor.store.budgets.enabled, whole[0])
    graphs.against |= {sample.example.against for sample in samples.known.values()}
    count = len(graphs)
    for budget, why in rejected.items():
        graphs.refuse(budget, why)
    if (verified := forward.verdict.proven) is not None and fallback_budget is None:
        key = spec.key(inputs.statics, inputs.row_shape)
        verified[key] = verified.get(key, True) and not rejected
    if rejected:
        message = (
            f"{type(forward.module).__name__}: {len(rejected)} of {max(count, len(rejected))} graphs failed the proof "
            "at their capture and are not used: their calls use others, or run eager.\n"
            f"{next(iter(rejected.values()))}"
        )
        if options.strict:
            raise VerificationError(message)
        warn(message)


def _failing(
    replays: Replays, samples: Samples, graphs: GraphSet, forward: Forward, cases: Sequence[Case]
) -> list[tuple[Case, str]]:
    """Return the cases in which a graph is wrong, and why."""
    failures, wrong, smallest_right = list[tuple[Case, str]](), list[tuple[Case, SampleRun, str]](), 0
    for case in cases:
        with graphs.agreement.attempt() as attempt:
            sample = samples.first(case.layouts, itself=case.itself)
        if (failure := attempt.take()) is not None:
            if isinstance(failure.error, SpecError):
                raise failure.error
            if case.must_run:
                why = f"{case.budget} could not be proven, because synthetic calls fail: {failure.error}"
                failures.append((case, why))
            continue
        with graphs.agreement.attempt() as attempt:
            _check_indices(forward, graphs, case.budget, sample)
        if (failure := attempt.take()) is not None:
            why = f"{case.budget}: a replay would fail, as its forward does: {failure.error!r}"
            failures.append((case, why))
            continue
        example, least = sample.example, min(sample.example.layout.rows)
        with graphs.agreement.attempt() as attempt:  # operators may refuse NaN
            pack = Pack(case.budget, range(len(example.layout)))
            orders = _orders(example.layout) if case.reorder else []
            if (found := replays.disagreement(graphs, [pack], example, orders)) is not None:
                raise VerificationError(found)
        if (failure := attempt.take()) is None:
            smallest_right = min(smallest_right or least, least)
        else:
            wrong.append((case, sample, str(failure.error)))
    spec = forward.spec
    only_small = all(min(sample.example.layout.rows) < smallest_right for _, sample, _ in wrong)
    few = spec.advice(FEW_ROWS, FEW_ROWS.partition(" If")[0]).format(smallest_right)
    hint = f"\n{few}" if only_small and not spec.batched else ""
    for case, sample, why in wrong:
        if case.must_run or not graphs.agreement.alone or _repeats(forward, sample, replays.limit):
            failures.append((case, f"{why}{hint}"))
    return failures


def _check_indices(forward: Forward, graphs: GraphSet, budget: Budget, sample: SampleRun) -> None:
    """Run the forward eager if it takes indices on a GPU, and the sample uses up something of the budget. Syncs.

    Behind the last item, indices may be out of range then, which replays do not check.
    """
    call, layout = sample.example.call, sample.example.layout
    rows, items, segments, _ = forward.spec.needs.load(layout)
    is_full = rows == budget.rows or items == budget.items or segments == budget.segments
    if sample.has_indices and is_full and graphs.agreement.alone:
        ErrorLocator(forward, graphs.arena, call, Pack(budget, range(len(layout))), call).check_indices()


def _orders(layout: Layout) -> list[list[range]]:
    """Return the groups to replay from the last to the first: all, and some without the first and the extremes."""
    groups, rows = layout.groups, layout.group_rows
    if len(groups) == 1:
        return []
    left_out = {0, rows.index(max(rows)), rows.index(min(rows))}
    return [groups, [group for at, group in enumerate(groups) if at not in left_out] or groups[1:]]


def _repeats(forward: Forward, sample: SampleRun, limit: float) -> bool:
    """Return True if what gave the expected output gives it again. Syncs.

    Torch's convolution of bfloat16 on the CPU, for example, reads memory that nobody wrote at some small sizes.
    """
    example, output, *_ = sample
    return all(example.differs_from(forward.reference(example.call).output, output) <= limit for _ in range(3))


def _wrong_eager(forward: Forward, samples: Samples, graphs: GraphSet, largest: Budget, limit: float) -> list[str]:
    """Return why the declaration is wrong whatever graphs hold, or nothing."""
    spec, agreement = forward.spec, graphs.agreement
    checks: list[tuple[Iterable[Layout], Callable[[Forward, float, SampleRun], None], Kind]] = [
        (layouts.rich(spec, largest), check_eager, "plain"),
        (layouts.many_items(spec), check_in_parts, "plain"),
        (layouts.uneven(spec), check_in_parts, "uneven"),
    ]
    if samples.calls.has_integers:
        checks.append((layouts.even(spec), check_eager, "repeated"))
    if forward.may_leave_out:
        checks.append((layouts.even(spec), check_left_out, "plain"))
    for made, check, kind in checks:
        some, too_long = samples.affordable(made, agreement.alone)
        if not some and too_long is not None:
            graphs.unproven.add(too_long)
            continue
        with agreement.attempt() as attempt:
            itself = kind != "uneven"  # whose items are compared with each other
            check(forward, limit, samples.first(some, kind, by_module=itself, itself=itself))
        if why := _mismatch(attempt.take()):
            return why
    with agreement.attempt() as attempt:
        lengths = layouts.single(spec, largest) if spec.counts_rows else ()
        check_lengths(forward, (next(samples.calls.of(layout)) for layout in lengths))
    return _mismatch(attempt.take())


def _depends_on_state(graphs: GraphSet, check: StateCheck) -> list[str]:
    """Return why outputs depend on earlier runs, or nothing."""
    with graphs.agreement.attempt() as attempt, graphs.agreement.rehearsal():  # as the check began
        if (why := check.find_evidence()) is not None:
            raise VerificationError(why)
    graphs.kept = check.kept
    failure = attempt.take()
    if failure is not None and isinstance(failure.error, CaptureError):
        raise failure.error
    return _mismatch(failure)


def _mismatch(failure: Failure | None) -> list[str]:
    """Return what a failure says against a declaration, or nothing.

    Raises:
        SpecError: The failure says that the declaration does not match the module.
    """
    if failure is not None and isinstance(failure.error, SpecError):
        raise failure.error
    return [str(failure.error)] if failure is not None and isinstance(failure.error, VerificationError) else []


@contextmanager
def _live_memory_restored(pool: Pool) -> Iterator[None]:
    """Save what tensors of the pool hold, which others may need, because the check overwrites the whole pool."""
    live = pool.memory(live=True)
    saved = [memory.clone() for memory in live]
    try:
        yield
    finally:
        for memory, before in zip(live, saved, strict=True):
            memory.copy_(before)
