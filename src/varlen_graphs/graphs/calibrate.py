"""Time replays and eager runs, once after the capture."""

import math
import time
from collections.abc import Callable, Sequence
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

REPEATS = 4
REPEATS_MS = 2.0
"""Largest number of replays in each of two rounds: short ones for about `REPEATS_MS`, others once."""


def measure(
    graphs: GraphSet,
    forward: Forward,
    budgets: Sequence[Budget],
    held: int,
    known: Costs | None = None,
    replayed: bool = False,
) -> Costs:
    """Time replays of budgets, and the forward eager. Synchronizes with the device.

    Replays a budget a few times, with the items that graphs are captured with: longer ones might exceed a limit of the
    module's own. The cost of longer segments was timed on attention itself (`GraphSet.per_square`). Floating rows are
    random: a chip is faster on zeros. If timing fails, costs stay assumed ones, with a warning: a function for a host
    buffer may refuse items that no call would bring, and memory may suffice for graphs but not for an eager run.

    Args:
        graphs: The graphs to replay.
        forward: The forward to run eager.
        budgets: The budgets to time.
        held: Bytes that the graphs hold in their pool.
        known: Costs of budgets that were timed before; then only replays are timed.
        replayed: True if all graphs were replayed before: the first launch of a graph uploads it.
    """
    try:
        # The pool stays as large as the largest graph needed, which may have been timed before, or dropped.
        bytes_per_row = held / graphs.most_rows + graphs.arena.rows[0].nbytes
        replays = _replays(graphs, forward.spec, budgets, replayed)
        if known is not None and known.measured:
            return known.with_more(replays, bytes_per_row)
        host, factor = _eager(graphs, forward, replays)
        return Costs(replays, graphs.per_square, host, factor, bytes_per_row)
    except Exception as error:  # of the user's code, or the device's
        warn(f"budgets could not be timed, so calls are split by rows alone and always use graphs: {error}")
        return Costs.in_rows(budgets)


def _replays(graphs: GraphSet, spec: BufferSpec, budgets: Sequence[Budget], replayed: bool) -> dict[Budget, float]:
    """Return the milliseconds of a replay of each budget, without attention."""
    arena = graphs.arena
    if arena.rows.is_floating_point():
        arena.rows.normal_(
            generator=torch.Generator(arena.rows.device).manual_seed(0)
        )  # leaves the default generator alone
    samples = {budget: spec.sample(budget) for budget in budgets}
    times = dict.fromkeys(budgets, math.inf)
    # A chip takes some tenths of a second to slow down to where its power allows, by up to an eighth. The small budgets
    # are done by then: from there on, those that compete for a call, of about the same size, meet it in the same state.
    upward = sorted(budgets)
    for round_ in (upward, upward[::-1]):
        for budget in round_:
            arena.load_layout(samples[budget], budget)
            run = partial(graphs.replay, budget)
            launched = replayed or times[budget] < math.inf
            times[budget] = min(times[budget], device_milliseconds(run, graphs.consensus, launched))
    return {b: max(1e-6, times[b] - graphs.per_square * spec.usage.squares(samples[b])) for b in budgets}


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


def device_milliseconds(run: Callable[[], object], consensus: Consensus, launched: bool = False) -> float:
    """Return the time of the shortest run, because others may use the device meanwhile."""
    if not launched:
        run()  # the first launch of a graph uploads it
    times = [consensus.same(between_events(run))]
    while len(times) < REPEATS and sum(times) < REPEATS_MS:
        times.append(consensus.same(between_events(run)))
    return min(times)


def between_events(run: Callable[[], object]) -> float:
    """Return the device's milliseconds for one run. Syncs with the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


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
