"""The check of new graphs at their capture: examples replayed over NaN and over other values, before calls use them."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import AttentionMask
from varlen_graphs.calls.execute import Executor
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import CaptureError, SpecError, VerificationError, warn
from varlen_graphs.graphs.cached_state import StateCheck
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_capture import MOST_KEPT
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.graphs.progress import Progress
from varlen_graphs.layouts.items import Layout
from varlen_graphs.options.verify import Verify
from varlen_graphs.routing.packing import ReplayBatch
from varlen_graphs.verify.compare import Example
from varlen_graphs.verify.disagreement import Replays
from varlen_graphs.verify.eager_checks import check_eager, check_in_parts, check_left_out, check_lengths
from varlen_graphs.verify.error_locator import ErrorLocator
from varlen_graphs.verify.samples import SampleRun, Samples
from varlen_graphs.verify.synthetic_calls import Kind
from varlen_graphs.verify.synthetic_layouts import SyntheticLayouts

LOGGER = logging.getLogger("varlen_graphs")

Result = TypeVar("Result")

FEW_ROWS = (
    "Only calls with an item of fewer than {0} rows were wrong. If the module needs that many of each, declare "
    "BufferSpec(..., min_rows={0}): calls with smaller ones run eager."
)


SIGNS: tuple[Kind, ...] = ("positive", "negative")
"""Kinds of numbers with which padding of zeros is the odd one out."""


class Case(NamedTuple):
    """Items for one graph to replay.

    Attributes:
        budget: The budget of the graph.
        layouts: Items; it replays the first ones that the module takes.
        reorder: If True, also some of them in another order.
        must_run: If False, the module may refuse them all.
        itself: If False, the declared forward tells what is right, not the module itself: they differ, if they do, in
            smaller layouts too, and modules may run many segments one by one.
        kind: Kind of the numbers in the rows. Others than plain ones are replayed over zeros, as calls are.
    """

    budget: Budget
    layouts: Iterable[Layout]
    reorder: bool = False
    must_run: bool = True
    itself: bool = True
    kind: Kind = "plain"


class CaptureCheck:
    """Checks new graphs before calls use them, and rejects those that fail.

    Args:
        executor: Replays calls; it holds the check.
        options: `strict` and `tolerance`.
    """

    def __init__(self, executor: Executor, options: Verify) -> None:
        self._executor: Executor = weakref.proxy(executor)
        self._options = options
        self._small: WeakKeyDictionary[GraphSet, dict[Layout, SampleRun]] = WeakKeyDictionary()

    def __call__(
        self,
        graphs: GraphSet,
        budgets: Sequence[Budget],
        eager: Forward,
        check: StateCheck | None,
        call: Call | None,
    ) -> None:
        """Check the graphs of these budgets. Syncs.

        Examples are made of the rows of the call that needs the graphs. Every graph replays a few small items, which
        are those of earlier graphs of the set if these still show the same; one of the exact size of calls no more. Of
        a set with a new largest graph, that one replays items of several sizes and numbers of frames, the smallest one
        that holds these all and some of them in another order, and the smallest one the edges of its budget. Each is
        replayed with NaN in the pool and in all padding, and with other values. Outputs must equal those of the module
        itself, run eager without padding, or of the declared forward where all of a budget is used up, and must not
        change with the padding. The declared forward also runs eager, on items that may be more and larger than those
        of graphs, of other magnitudes, and without what calls may leave out. If all graphs of a new set fail, all
        budgets are rejected. Where the module cannot run with the arguments of a call, because it needs the declared
        buffers, the declared forward runs in its place, with the references of all kernels.

        Eager runs are those of `eager`, on a shadow of the module. Of a new set that is the one of the check of state:
        in the end they must have changed no output. Leaves NaN in the padding.

        Raises:
            VerificationError: A graph failed, with `strict`.
            SpecError: The declaration does not match the module.
        """
        if not budgets:
            return
        executor, inputs = self._executor, graphs.inputs
        with executor.mode.autocast(inputs.device.type), executor.pool.live_memory_restored():
            checks, failures = self._of_each(graphs, budgets, eager, call)
            is_new = check is not None and {*budgets} == {*graphs.budgets}
            rejected = {case.budget: why for case, why in failures}
            whole, right = list[str](), [budget for budget in graphs.budgets if budget not in rejected]
            largest = max(graphs.budgets, default=None)
            if right and largest in budgets:  # none that was checked before is as large
                whole = [why for _, why in checks.failing(checks.of_a_set(right))] or checks.wrong_eager()
            if largest in rejected and not is_new:  # its calls would be split over the others
                whole = whole or [rejected[largest]]
            if check is not None and is_new:
                whole += checks.depends_on_state(check)
                whole = whole or ([] if right else [*rejected.values()])
            if whole:
                rejected |= dict.fromkeys(executor.store.budgets.enabled, whole[0])
        if rejected:
            graphs.split_is_right = False
        graphs.against |= checks.against()
        for budget, why in rejected.items():
            graphs.reject(budget, why)
        forward = executor.forward
        if (verified := forward.verdict.verified) is not None and graphs.exact.keys().isdisjoint(budgets):
            key = executor.spec.key(inputs.static_args, inputs.row_shape)
            verified[key] = verified.get(key, True) and not rejected
        if rejected:
            self._report(rejected, max(len(budgets), len(rejected)))

    def _of_each(
        self, graphs: GraphSet, budgets: Sequence[Budget], eager: Forward, call: Call | None
    ) -> tuple["_Checks", list[tuple[Case, str]]]:
        """Check what every graph replays; return the checks, and what failed.

        By what the module gave for earlier graphs, and if that fails anew, because weights may have changed since.
        """
        known = self._small.get(graphs)
        checks = _Checks(self._executor, self._options, graphs, eager, call, known)
        failures = checks.failing(checks.of_each(budgets))
        if failures and known:
            checks = _Checks(self._executor, self._options, graphs, eager, call)
            failures = checks.failing(checks.of_each(budgets))
        if not failures:
            self._small[graphs] = checks.small()
        return checks, failures

    def _report(self, rejected: Mapping[Budget, str], budgets: int) -> None:
        """Warn of rejected graphs, or raise."""
        message = (
            f"{type(self._executor.forward.module).__name__}: {len(rejected)} of {budgets} graphs failed verification "
            "at their capture and are not used: their calls use others, or run eager.\n"
            f"{next(iter(rejected.values()))}"
        )
        if self._options.strict:
            raise VerificationError(message)
        LOGGER.warning("%s", message.partition("\n")[0])
        warn(message)


class _Checks:
    """Checks of the graphs of a capture; each says what is wrong. Ranks that share a module agree on all of it.

    Args:
        executor: Replays calls.
        options: `tolerance`.
        graphs: The graphs.
        eager: The forward over a shadow.
        call: The call that needs the graphs, if there is one.
        known: Samples of before.
    """

    def __init__(
        self,
        executor: Executor,
        options: Verify,
        graphs: GraphSet,
        eager: Forward,
        call: Call | None,
        known: Mapping[Layout, SampleRun] | None = None,
    ) -> None:
        self._graphs = graphs
        self._forward = eager
        self._layouts = SyntheticLayouts(
            executor.spec, None if call is None else read_layout(executor.spec, replace(call))
        )
        self._samples = Samples(eager, graphs.inputs, call, graphs.constants or [])
        self._samples.known |= known or {}
        self._replays = Replays(executor, eager, options.tolerance, graphs.inputs.device)
        self._smallest_right = 0  # rows of the smallest item that was right, 0 before there is one

    def of_each(self, budgets: Sequence[Budget]) -> list[Case]:
        """Return what every graph replays, the largest first."""
        return [Case(budget, self._layouts.small(budget)) for budget in sorted(budgets, reverse=True)]

    def of_a_set(self, budgets: Sequence[Budget]) -> list[Case]:
        """Return what the graphs of a new set replay in addition: what fails there concerns all of its budgets.

        Edges are those of the smallest budget, and orders those of the smallest one that holds the mixed items: what is
        wrong there is so in every graph, and replays of these are short. The longest item is that of the largest one.
        """
        layouts, spec = self._layouts, self._forward.spec
        smallest, largest = min(budgets), max(budgets)
        mixed = spec.usage.of(next(layouts.mixed(largest)))
        ordered = min(budget for budget in budgets if budget.holds(*mixed) or budget is largest)
        cases = [Case(budget, layouts.mixed(budget), budget is ordered) for budget in {largest: 0, ordered: 0}]
        roomy = next(layouts.with_room(sorted(budgets)), None)
        if roomy is not None:
            cases += [Case(roomy[0], [roomy[1]], must_run=False, kind=kind) for kind in SIGNS]
        edges = (one for one in layouts.edges(smallest) if (smallest, one) != roomy)
        cases += [Case(smallest, [one], must_run=False) for one in edges]
        cases += [Case(smallest, [one], must_run=False, itself=False) for one in layouts.full(smallest)]
        if any(isinstance(buffer, AttentionMask) for buffer in spec.buffers):  # short items show no window
            cases += [Case(largest, [one], must_run=False) for one in layouts.longest(largest)]
        return cases

    def small(self) -> dict[Layout, SampleRun]:
        """Return the samples so far that take little memory."""
        return {layout: one for layout, one in self._samples.known.items() if one.nbytes <= MOST_KEPT}

    def against(self) -> set[str]:
        """Return what outputs were compared with, in words."""
        return {sample.example.against for sample in self._samples.known.values()}

    def _tried(self, run: Callable[[], Result]) -> Result | Exception:
        """Return what a function returns, or its error, or that of another rank."""
        with self._graphs.consensus.collective_try() as outcome:
            result = run()
        failure = outcome.take()
        return result if failure is None else failure.error

    def failing(self, cases: Sequence[Case]) -> list[tuple[Case, str]]:
        """Return the cases in which a graph is wrong, and why.

        Raises:
            SpecError: The declaration does not match the module.
        """
        failures, wrong = list[tuple[Case, str]](), list[tuple[Case, SampleRun, str]]()
        begun: tuple[Case, SampleRun, Callable[[], None]] | None = None

        def end(case: Case, sample: SampleRun, finish: Callable[[], None]) -> None:
            if isinstance(error := self._tried(finish), Exception):
                wrong.append((case, sample, str(error)))
            else:
                least = min(sample.example.layout.rows)
                self._smallest_right = min(self._smallest_right or least, least)

        for case in self._shown(cases):
            sample = self._tried(partial(self._samples.first, case.layouts, case.kind, itself=case.itself))
            if isinstance(sample, SpecError):
                raise sample
            if isinstance(sample, Exception):
                if case.must_run:
                    why = f"{case.budget} could not be verified, because synthetic calls fail: {sample}"
                    failures.append((case, why))
            elif isinstance(error := self._tried(partial(self._check_indices, case, sample)), Exception):
                failures.append((case, f"{case.budget}: a replay would fail, as its forward does: {error!r}"))
            elif isinstance(finish := self._tried(partial(self._begin_replays, case, sample)), Exception):
                wrong.append((case, sample, str(finish)))
            else:
                if begun is not None:
                    end(*begun)  # while the replays of this case run
                begun = case, sample, finish
        if begun is not None:
            end(*begun)
        spec = self._forward.spec
        only_small = all(
            case.kind == "plain" and min(sample.example.layout.rows) < self._smallest_right for case, sample, _ in wrong
        )
        few = spec.advice(FEW_ROWS, FEW_ROWS.partition(" If")[0]).format(self._smallest_right)
        hint = f"\n{few}" if only_small and not spec.batched else ""
        for case, sample, why in wrong:
            if case.must_run or not self._graphs.consensus.alone or self._repeats(sample):
                failures.append((case, f"{why}{hint}"))
        return failures

    @staticmethod
    def _shown(cases: Sequence[Case]) -> Iterator[Case]:
        """Yield cases, and show how many there were."""
        with Progress("verifying", len(cases)) as progress:
            for case in cases:
                yield case
                progress.update()

    def _begin_replays(self, case: Case, sample: SampleRun) -> Callable[[], None]:
        """Begin the replays of a case; return what raises if they are wrong. Operators may refuse NaN."""
        layout = sample.example.layout
        orders = _orders(layout) if case.reorder else []
        batch = ReplayBatch(case.budget, range(len(layout)))
        call = sample.example.call
        filling = None if case.kind == "plain" else _of_zeros(call)
        disagreement = self._replays.disagreement(self._graphs, [batch], sample.example, orders, filling)

        def finish() -> None:
            if (found := disagreement()) is not None:
                raise VerificationError(found)

        return finish

    def _check_indices(self, case: Case, sample: SampleRun) -> None:
        """Run the forward eager if it takes indices on a GPU, and the sample uses up something of the budget. Syncs.

        Behind the last item, indices may be out of range then, which replays do not check.
        """
        budget, call, layout = case.budget, sample.example.call, sample.example.layout
        rows, items, segments, _ = self._forward.spec.usage.of(layout)
        is_full = rows == budget.rows or items == budget.items or segments == budget.segments
        if sample.has_indices and is_full and self._graphs.consensus.alone:
            batch = ReplayBatch(budget, range(len(layout)))
            ErrorLocator(self._forward, self._graphs.arena, call, batch, call).check_indices()

    def _repeats(self, sample: SampleRun) -> bool:
        """Return True if what gave the expected output gives it again. Syncs.

        Torch's convolution of bfloat16 on the CPU, for example, reads memory that nobody wrote at some small sizes.
        """
        example, output, limit = sample.example, sample.output, self._replays.limit
        again = (self._forward.reference(example.call).output for _ in range(3))
        return all(example.differs_from(one, output) <= limit for one in again)

    def wrong_eager(self) -> list[str]:
        """Return why the declaration is wrong whatever graphs hold, or nothing."""
        forward, samples, layouts = self._forward, self._samples, self._layouts
        largest = max(self._graphs.budgets)
        checks: list[tuple[Iterable[Layout], Callable[[Forward, float, SampleRun], None], Kind]] = [
            (layouts.rich(largest), check_eager, "plain"),
            (layouts.many_items(), check_in_parts, "plain"),
            (layouts.uneven(), check_in_parts, "uneven"),
        ]
        if samples.calls.has_integers:
            checks.append((layouts.even(), check_eager, "repeated"))
        if forward.may_leave_out:
            checks.append((layouts.even(), check_left_out, "plain"))

        def run(check: Callable[[Forward, float, SampleRun], None], some: Iterable[Layout], kind: Kind) -> None:
            itself = kind != "uneven"  # whose items are compared with each other
            check(forward, self._replays.limit, samples.first(some, kind, by_module=itself, itself=itself))

        for made, check, kind in checks:
            some, too_long = samples.affordable(made, self._graphs.consensus.alone)
            if too_long is not None:
                self._graphs.unverified.add(too_long)
            elif why := _mismatch(self._tried(partial(run, check, some, kind))):
                return why
        lengths = layouts.single(largest) if forward.spec.counts_rows else ()
        calls = (next(samples.calls.of(layout)) for layout in lengths)
        return _mismatch(self._tried(partial(check_lengths, forward, calls)))

    def _changed_by_longer_calls(self, check: StateCheck) -> str | None:
        """Return why the longest item has another output than at first, if the module keeps something. Syncs.

        Runs of items larger than those of graphs may have changed what the few rows of the check do not show.
        """
        samples = self._samples.known.values()
        if not samples or not check.shadow.changed():
            return None
        longest = max(samples, key=lambda one: max(one.example.layout.rows))
        example, output = longest.example, longest.output
        now, again = (self._forward.reference(example.call) for _ in range(2))
        if example.differs_from(now.output, output) <= self._replays.limit:
            return None
        if Example(example.call, *now).differs_from(again.output, output) > self._replays.limit:
            return None  # it draws random numbers
        return check.mismatch("after longer calls", check.shadow.changes())

    def depends_on_state(self, check: StateCheck) -> list[str]:
        """Return why outputs depend on earlier runs, or nothing.

        Raises:
            CaptureError: Runs have changed what no copy of the module reaches.
        """

        def run() -> None:
            with self._graphs.consensus.dry_run():  # as the check began
                why = check.find_mismatch() or self._changed_by_longer_calls(check)
            if why is not None:
                raise VerificationError(why)

        error = self._tried(run)
        self._graphs.kept = check.kept
        if isinstance(error, CaptureError):
            raise error
        return _mismatch(error)


def _of_zeros(call: Call) -> Call:
    """Return a call with zeros in its rows and in the tensors beside them, as calls find padding."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in call.inputs.items()}
    return replace(call, rows=torch.zeros_like(call.rows), inputs=zeros)


def _orders(layout: Layout) -> list[list[range]]:
    """Return the groups to replay from the last to the first: all, and some without the first and the extremes."""
    groups, rows = layout.groups, layout.group_rows
    if len(groups) == 1:
        return []
    left_out = {0, rows.index(max(rows)), rows.index(min(rows))}
    return [groups, [group for at, group in enumerate(groups) if at not in left_out] or groups[1:]]


def _mismatch(error: Exception | None) -> list[str]:
    """Return what an error says against a declaration, or nothing.

    Raises:
        SpecError: The error, if it says that the declaration does not match the module.
    """
    if isinstance(error, SpecError):
        raise error
    return [str(error)] if isinstance(error, VerificationError) else []
