"""Captures between calls: of budgets that calls requested, and of sizes that recur."""

import logging
from threading import Event

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.exact_graphs import ExactGraphs
from varlen_graphs.calls.lazy_capture import Requests
from varlen_graphs.graphs.graph_capture import reason_of
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.options.capture import Capture
from varlen_graphs.stats import Stats

LOGGER = logging.getLogger("varlen_graphs")


class CaptureQueue:
    """The graphs to capture between calls: budgets that calls requested, and then sizes that recur.

    Args:
        store: Holds the graphs.
        stats: Tells how many calls there were, and counts failures.
        options: `lazy` and `exact` of the encoder.

    Attributes:
        pending: Set when there may be something to capture.
        requests: The budgets that calls requested; `None` if they capture.
        exact: The graphs of sizes that recur; `None` if there are to be none.
    """

    def __init__(self, store: GraphStore, stats: Stats, options: Capture) -> None:
        self.pending = Event()
        self.requests = Requests(store, stats, self.pending) if options.lazy else None
        self.exact = ExactGraphs(store, options.exact, self.pending) if options.exact else None
        self._pool = store.pool
        self._stats = stats
        self._name = type(store.forward.module).__name__
        self._logged: set[str] = set()

    def capture(self, most: int | None) -> list[Budget]:
        """Capture at most so many graphs, each in a turn of the pool of its own; return their budgets and sizes.

        Raises:
            InputError: This thread is inside a stage.
            CaptureError, StaleGraphError, and errors of the module: As for a call that captures.
        """
        done: list[Budget] = []
        while most is None or len(done) < most:
            with self._pool.exclusive(), self._pool.order:
                self.pending.clear()  # first, so that nothing from here on is missed
                sources = [source for source in (self.requests, self.exact) if source is not None]
                captured = next(filter(None, (source.capture_next() for source in sources)), None)
            if captured is None:
                break
            done.append(captured)
        if len(done) == most:
            self.pending.set()  # there may be more
        return done

    def count_failure(self, error: BaseException) -> None:
        """Count an error that ended the thread which captures, and log it, unless the same was logged before."""
        reason = reason_of(error)
        self._stats.count_capture_failure(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            LOGGER.error(
                "captures of %s in the background have ended: %s. Calls go on with the graphs that there are, and run "
                "eager where there is none; mend the cause, and call capture_in_background() again",
                self._name,
                reason,
            )
