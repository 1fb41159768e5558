"""Default budgets are kept as far as memory and time allow."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.memory import available_bytes, empty_cache, forget_frames, is_out_of_memory
from varlen_graphs.kernels.launch import compiling_in_threads
from varlen_graphs.torch_dispatch.memory_meter import MemoryMeter
from varlen_graphs.torch_dispatch.thread_modes import run_under

FIRST_ANSWER_S = {"cpu": 30.0, "cuda": 10.0}
"""Seconds that the first answer may take with default budgets, by the type of the device."""

ALIKE_S = {"cpu": 30.0, "cuda": 2.0}
"""The same where all items are alike: a call of more items than a budget holds is split, which costs nothing on a GPU
that each replay keeps busy for long."""

RUNS = 20
"""Number of runs of the largest budget that its capture and its check take."""

SHARE, SHARE_OF_ALL = 0.5, 0.75
"""Shares of the memory that is available now which one default budget may take, and tapes of several."""

WORTH = 1.5
"""Growth of a budget below which another run would hardly tell more."""

BUSY = 1.1
"""Ratio of the time until a GPU is done to the host's own from which a run is bound by the GPU."""


class Taken(NamedTuple):
    """Cost of a budget: the seconds of a run, and the bytes that it and the graph need.

    A run that keeps a GPU waiting for the host counts as none: a replay would take less by an unknown part.
    """

    seconds: float
    memory: float


class Allowance:
    """Decides which default budgets are left out, because they take too much memory or time.

    Budgets are run, the smallest first; the next one is the largest whose run is allowed even if memory and time grow
    with the product of rows and the longest segment, as those of dense attention do. So no run takes more than is
    allowed, but one on a GPU whose shorter runs were bound by the host; and what is left out in the end takes up to
    that product more than the largest one that was run.

    Args:
        device: The device of the runs.
        alike: True if all items are alike.
    """

    def __init__(self, device: torch.device, alike: bool) -> None:
        self._device = device
        self._seconds = (ALIKE_S if alike else FIRST_ANSWER_S)[device.type] / RUNS
        self._taken: dict[Budget, Taken] = {}
        self._memory: float | None = None  # available before the runs, which may not have given theirs back
        self._failed = math.inf  # weight of the smallest budget for a run of which there was no memory

    def of_runs(
        self, budgets: Sequence[Budget], run: Callable[[Budget], object], again: Callable[[Budget], object]
    ) -> dict[Budget, str]:
        """Run as many of these budgets as it takes, and return those to leave out, with the reasons.

        None, if larger ones were run before. The first of all, which is the smallest one, is never left out. The
        largest that is kept, or one nearly as large, is run in any case: what the module writes in long runs alone
        shows in no other.

        Args:
            budgets: The budgets.
            run: Runs one.
            again: Runs it again, with nothing that watches the run.
        """
        if not self._is_worth(max(budgets, key=_weight)):
            return {}
        others = sorted(budgets, key=_weight)
        self._memory = available_bytes(self._device)
        if not self._taken:
            self._measure(others.pop(0), run, again)
        while True:
            reasons = {budget: self._why_not(budget) for budget in others}
            following = max((one for one, reason in reasons.items() if reason is None), key=_weight, default=None)
            if following is None or not self._is_worth(following):
                return {budget: reason for budget, reason in reasons.items() if reason is not None}
            self._measure(following, run, again)

    def _is_worth(self, budget: Budget) -> bool:
        """Return True if a run of a budget would tell more than those that were made."""
        return _weight(budget) >= WORTH * max(map(_weight, self._taken), default=0)

    def of_tapes(self, budgets: Sequence[Budget]) -> dict[Budget, str]:
        """Return those of these budgets for whose tapes, which share no memory, there is none left.

        The largest comes first, because it holds most calls, and then the smallest.
        """
        if self._device.type != "cpu" or not self._taken:
            return {}
        left, self._memory = SHARE_OF_ALL * (self._memory or available_bytes(self._device)), None  # later there is less
        left_out, ascending = dict[Budget, str](), sorted(budgets, key=_weight)
        for budget in [*ascending[-1:], *ascending[:-1]]:
            memory = self._most(budget).memory
            if memory > left:
                left_out[budget] = f"its tape may take up to {memory / 1e9:,.1f} GB beside the others"
            else:
                left -= memory
        return left_out

    def _most(self, budget: Budget) -> Taken:
        """Return what a budget takes at most, by those that were run; and per row no less than larger ones took."""
        growths = [(taken, _growth(one, budget)) for one, taken in self._taken.items()]
        larger = [(one, taken) for one, taken in self._taken.items() if one.rows >= budget.rows]
        least = max([taken.seconds * budget.rows / one.rows for one, taken in larger], default=0.0)
        return Taken(
            max(least, min(taken.seconds * growth for taken, growth in growths)),
            min(taken.memory * growth for taken, growth in growths),
        )

    def _why_not(self, budget: Budget) -> str | None:
        """Return the reason why a budget takes too much; `None` if it does not."""
        if _weight(budget) >= self._failed:
            return "there was no memory for a run"
        taken, memory = self._most(budget), SHARE * (self._memory or 0)
        if taken.memory > memory:
            return f"a graph may take up to {taken.memory / 1e9:,.1f} GB, and {memory / 1e9:,.1f} GB may be used"
        if taken.seconds > self._seconds:
            return f"a run may take up to {taken.seconds:.1f} s, and capture and check take some {RUNS} runs"
        return None

    def _measure(self, budget: Budget, run: Callable[[Budget], object], again: Callable[[Budget], object]) -> None:
        """Run a budget, and note what it takes."""
        meter, on_gpu = MemoryMeter(self._device), self._device.type == "cuda"
        try:
            if not (on_gpu or self._taken):
                run(budget)  # fills what the module computes once and keeps
            with compiling_in_threads() as compilation:
                start = time.perf_counter()
                run_under(partial(run, budget), meter)
                seconds = time.perf_counter() - start
            if compilation.used_references:  # which take other memory
                meter = MemoryMeter(self._device)
                run_under(partial(run, budget), meter)
            if on_gpu:
                seconds = self._busy_seconds(partial(again, budget))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            forget_frames(error)
            empty_cache(self._device)
            self._failed = min(self._failed, _weight(budget))
        else:
            memory = meter.most if on_gpu else meter.most + meter.total  # a tape keeps all results beside a run
            self._taken[budget] = Taken(seconds, memory)

    def _busy_seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds that a run keeps the GPU busy; 0 if it waits for the host meanwhile."""
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()  # what others have queued is no part of it
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        stream.synchronize()
        seconds = time.perf_counter() - start
        return seconds if seconds > BUSY * host else 0.0


def _weight(budget: Budget) -> int:
    return budget.rows * budget.max_seqlen


def _growth(one: Budget, other: Budget) -> float:
    """Return by which factor another budget may take more."""
    length = max(1.0, other.max_seqlen / one.max_seqlen)
    return max(1.0, other.rows / one.rows, length) * length
