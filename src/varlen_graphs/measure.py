"""How long replays take: timed once, after the capture."""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from varlen_graphs.budgets import Budget
from varlen_graphs.costs import Costs
from varlen_graphs.forward import Forward
from varlen_graphs.graphs import Graphs
from varlen_graphs.layout import Layout, sample_layout

LONG = 128
"""Rows of the items of the second layout, on which attention costs more: no longer than those that forwards were probed
with, because a module may have a limit of its own."""

REPEATS = 8
REPEATS_MS = 4.0
"""Replays are repeated twice at least, and short ones for about so long."""


def measure(graphs: Graphs, forward: Forward, budgets: Sequence[Budget], statics: dict[str, Any]) -> Costs:
    """Time every budget on two layouts, and the forward without a graph. Synchronizes with the device.

    Takes a few replays of each budget. The items are those that graphs are captured with, and the same rows in fewer
    items of twice their length or so. Floating rows are random: a chip is faster on zeros.

    Where that fails, costs stay assumed ones, with a warning: a function for a host buffer may refuse items that no
    call would bring, and memory that is enough for graphs may not be for a run without one.
    """
    try:
        return _measure(graphs, forward, budgets, statics)
    except Exception as error:  # of the user's code, or the device's
        warnings.warn(
            f"budgets could not be timed, so calls are split by rows alone and always use graphs: {error}", stacklevel=8
        )
        return Costs.in_rows(budgets)


def _measure(graphs: Graphs, forward: Forward, budgets: Sequence[Budget], statics: dict[str, Any]) -> Costs:
    arena, layout = graphs.arena, forward.spec.layout
    if arena.rows.is_floating_point():
        arena.rows.normal_(generator=torch.Generator(arena.rows.device).manual_seed(0))  # the caller's is the caller's
    short, gains, squares = {}, [], []
    for budget in budgets:
        many = sample_layout(layout, budget)
        few = sample_layout(layout, budget, items=-(-budget.rows // max(LONG, *many.rows)))
        times = []
        for sample in (many, few):
            arena.load_layout(sample, budget)
            times.append(_device_milliseconds(partial(graphs.replay, budget)))
        short[budget] = times[0], _squares(many)
        gains.append(times[1] - times[0])
        squares.append(_squares(few) - _squares(many))
    # The slope of the line through no difference: large budgets, where attention shows, count most.
    weight = sum(s * s for s in squares)
    per_square = max(0.0, sum(g * s for g, s in zip(gains, squares, strict=True)) / weight) if weight else 0.0
    replays = {budget: max(1e-6, ms - per_square * squares) for budget, (ms, squares) in short.items()}

    def eager(budget: Budget) -> float:
        sample = sample_layout(layout, budget)
        run = partial(forward.exact, arena.rows[: sample.total], sample, statics)
        return _host_milliseconds(run)

    smallest, largest = min(budgets), max(budgets)
    factor = max(1.0, eager(largest) / short[largest][0])
    return Costs(replays, per_square, eager(smallest), factor)


def _squares(layout: Layout) -> int:
    """The sum of squared segment lengths; every item of a sample is one segment."""
    return sum(rows * rows for rows in layout.rows)


def _device_milliseconds(run: Callable[[], object]) -> float:
    """The shortest of some runs, because others may use the device meanwhile."""
    run()  # the first launch of a graph uploads it
    times = [_between_events(run), _between_events(run)]
    while len(times) < REPEATS and sum(times) < REPEATS_MS:
        times.append(_between_events(run))
    return min(times)


def _between_events(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _host_milliseconds(run: Callable[[], object]) -> float:
    """The longer of two runs after a first one, which may compile kernels: what a call can count on."""
    times = []
    for _ in range(3):
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return max(times[1:])
