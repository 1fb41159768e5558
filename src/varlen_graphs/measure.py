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

LONGER = 8
"""How much longer the segments of the second layout are, on which attention costs more."""

REPEATS_MS = 4.0
"""Short replays are repeated for about so long."""


def measure(graphs: Graphs, forward: Forward, budgets: Sequence[Budget], statics: dict[str, Any]) -> Costs:
    """Time every budget on two layouts, and the forward without a graph. Synchronizes with the device.

    Takes a few replays of each budget. The items are those that graphs are captured with, and the same rows in fewer,
    longer ones, up to `max_seqlen`. Floating rows are random: a chip is faster on zeros.

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
        arena.rows.normal_()
    short, gains, squares = {}, [], []
    for budget in budgets:
        many = sample_layout(layout, budget)
        few = sample_layout(layout, budget, items=max(1, len(many) // LONGER))
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
    run()  # the first launch of a graph uploads it
    ms = _between_events(run, 1)
    repeats = int(min(8, REPEATS_MS / ms))
    return _between_events(run, repeats) if repeats else ms


def _between_events(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


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
