"""Counting the runs of a module where nobody who copies it or looks at it can tell."""

import queue
import weakref

RUNS = queue.SimpleQueue()
"""A reference to the module, and the rows, of each run."""


def ran(module, x):
    """Note a run; called by a forward."""
    RUNS.put((weakref.ref(module), len(x)))


def runs_of(*modules):
    """Return the rows of the runs of these modules themselves, not of copies, and forget all runs."""
    noted = [RUNS.get() for _ in range(RUNS.qsize())]
    return [rows for module, rows in noted if any(module() is one for one in modules)]
