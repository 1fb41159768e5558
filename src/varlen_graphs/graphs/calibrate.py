"""Time replays, each after its capture, and eager runs, once."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.consensus import Consensus
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import warn
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.layouts.items import Layout
from varlen_graphs.routing.costs import Costs

FEW_ROWS = 256
"""Rows of an eager run whose time is that of the host alone."""

REPEATS, OF_SHORT = 2, 4
"""Number of replays that are timed, and of those of at most a quarter of the rows of the largest graph."""


class ReplayTimes:
    """Times replays of graphs. The host goes on meanwhile, to capture the next one.

    Replays a budget a few times, with the items that graphs are captured with: longer ones might exceed a limit of the
    module's own. Floating rows are random: a chip is faster on zeros.

    Args:
        graphs: The graphs.
        spec: The declaration.
    """

    def __init__(self, graphs: GraphSet, spec: BufferSpec) -> None:
        self._graphs = graphs
        self._spec = spec
        self._times: dict[Budget, list[Callable[[], float]]] = {}

    def queue(self, budget: Budget) -> None:
        """Queue replays of a budget. No sync; a function for a host buffer may raise."""
        arena = self._graphs.arena
        if not self._times and arena.rows.is_floating_point():
            with suppress(NotImplementedError):  # torch draws no numbers of 8 bits
                arena.rows.normal_(
                    generator=torch.Generator(arena.rows.device).manual_seed(0)
                )  # leaves the default generator alone
        arena.load_layout(self._spec.sample(budget), budget)
        run = partial(self._graphs.replay, budget)
        run()  # the first launch of a graph uploads it, and no later one is waited for
        repeats = OF_SHORT if 4 * budget.rows <= self._graphs.most_rows else REPEATS
        self._times[budget] = [events_around(run) for _ in range(repeats)]

    def milliseconds(self, budgets: Sequence[Budget]) -> dict[Budget, float]:
        """Return the milliseconds of a replay of each budget, without attention; queue what was not. Syncs.

        The cost of longer segments was timed on attention itself (`GraphSet.per_square`). Of the shortest run, because
        others may use the device meanwhile.
        """
        for budget in sorted(budgets):
            if budget not in self._times:
                self.queue(budget)
        per_square, squares = self._graphs.per_square, self._spec.usage.squares
        times = {budget: min(time() for time in self._times[budget]) for budget in budgets}
        return {one: max(1e-6, time - per_square * squares(self._spec.sample(one))) for one, time in times.items()}

    def __enter__(self) -> "ReplayTimes":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until no graph replays: an error drops them."""
        if self._graphs.arena.rows.is_cuda:
            torch.cuda.current_stream(self._graphs.arena.rows.device).synchronize()


def measure(
    graphs: GraphSet,
    forward: Forward,
    budgets: Sequence[Budget],
    held: int,
    times: ReplayTimes,
    known: Costs | None = None,
) -> Costs:
    """Time replays of budgets that were not timed at their capture, and the forward eager. Syncs with the device.

    If timing fails, costs stay assumed ones, with a warning: a function for a host buffer may refuse items that no call
    would bring, and memory may suffice for graphs but not for an eager run.

    Args:
        graphs: The graphs to replay.
        forward: The forward to run eager.
        budgets: The budgets to time.
        held: Bytes that the graphs hold in their pool.
        times: Times of replays; has those of budgets that were timed at their capture.
        known: Costs of budgets that were timed before; then only replays are timed.
    """
    try:
        # The pool stays as large as the largest graph needed, which may have been timed before, or dropped.
        bytes_per_row = held / graphs.most_rows + graphs.arena.rows[0].nbytes
        replays = times.milliseconds(budgets)
        if known is not None and known.measured:
            return known.with_more(replays, bytes_per_row)
        host, factor = _eager(graphs, forward, replays)
        return Costs(replays, graphs.per_square, host, factor, bytes_per_row)
    except Exception as error:  # of the user's code, or the device's
        warn(f"budgets could not be timed, so calls are split by rows alone and always use graphs: {error}")
        return Costs.in_rows(budgets)


def _eager(graphs: GraphSet, forward: Forward, replays: dict[Budget, float]) -> tuple[float, float]:
    """Return the host's milliseconds for a call, and the ratio of its cost to that of a graph of its size."""
    spec = forward.spec

    def run(sample: Layout, budget: Budget, times: int) -> float:
        call = graphs.arena.call(sample, budget, graphs.inputs.static_args)
        return host_milliseconds(partial(forward.exact, call), graphs.consensus, times)

    smallest, largest = min(replays), max(replays)
    whole = spec.sample(largest)
    few = spec.sample(smallest) if spec.layout.padded else _few(spec, smallest)
    replay = replays[largest] + graphs.per_square * spec.usage.squares(whole)
    return run(few, smallest, times=2), max(1.0, run(whole, largest, times=1) / replay)


def _few(spec: BufferSpec, budget: Budget) -> Layout:
    """Return items of about `FEW_ROWS` rows, or of all rows of a smaller budget."""
    rows = min(-(-FEW_ROWS // spec.row_multiple) * spec.row_multiple, budget.rows)
    few = Budget(rows, max_seqlen=min(rows, budget.max_seqlen))
    few = Budget(few.rows, min(few.items, budget.items), min(few.segments, budget.segments), few.max_seqlen)
    return spec.sample(few)


def events_around(run: Callable[[], object]) -> Callable[[], float]:
    """Queue a run between two events; return a function that waits for the device's milliseconds of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()

    def milliseconds() -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    return milliseconds


def host_milliseconds(run: Callable[[], object], consensus: Consensus, repeats: int) -> float:
    """Return the time of the longest of some runs, after a first one that may compile kernels."""
    with consensus.collective_try() as outcome, consensus.dry_run():
        run()
    outcome.check()
    times = []
    for _ in range(repeats):
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return max(times)
