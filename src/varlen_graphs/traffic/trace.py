"""Record the sizes of the calls of an encoder."""

import json
import os
from collections import Counter
from collections.abc import Callable
from copy import copy
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import InputError, counted
from varlen_graphs.files import DAMAGED, integer, write_whole
from varlen_graphs.routing.costs import Costs


class Size(NamedTuple):
    """Size of a call."""

    rows: int
    items: int
    segments: int
    longest: int  # rows of the longest segment
    largest: int  # rows of the largest item, or group of items, which is never split


LARGEST = 2**48
"""No call has that many rows, nor a trace that many squares of them."""

COLUMNS = [*Size._fields, "calls"]
"""Columns of the calls in a file."""


class Trace:
    """Numbers of calls by size. Holds no contents of calls.

    Memory grows with the number of different sizes, not with the number of calls. Calls may be counted from any thread.

    Args:
        costs: Costs of the recorded encoder, or a function that returns the current ones.

    Attributes:
        calls: Number of calls of each `Size`.
        squares: Sum of squared segment lengths over all calls, to which the time of attention is proportional. Excludes
            calls whose items are known to the GPU only.
    """

    def __init__(self, costs: Costs | Callable[[], Costs] | None = None) -> None:
        self.calls: Counter[Size] = Counter()
        self.squares = 0
        self._costs = costs
        self._lock = RLock()  # a signal handler may interrupt who holds it

    @property
    def costs(self) -> Costs | None:
        """Costs of replays of the recorded encoder: current ones during the recording, then those at its end."""
        return self._costs() if callable(self._costs) else self._costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._costs = costs

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"calls": self.calls.copy(), "squares": self.squares, "_costs": self.costs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    def count(self, size: Size, squares: int = 0) -> None:
        """Count a call. `squares` is the sum of its squared segment lengths."""
        with self._lock:
            self.calls[size] += 1
            self.squares += squares

    def copy(self) -> "Trace":
        """Return a copy that later calls do not change."""
        return copy(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, with the costs measured so far. Replaces an existing file atomically.

        Calls may be recorded meanwhile. Raises `OSError` if the file cannot be written.
        """
        now = self.copy()
        costs = now.costs
        value = {
            "columns": COLUMNS,
            "calls": [[*size, count] for size, count in sorted(now.calls.items())],
            "squares": now.squares,
            "costs": costs.as_json() if costs is not None and costs.measured and costs.replays else None,
        }
        write_whole(path, json.dumps(value) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a file written by `save`.

        Raises:
            InputError: The file is not a valid trace.
            OSError: The file cannot be read.
        """
        trace = cls()
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["columns"] != COLUMNS:
                raise InputError(f"columns are {quoted(value['columns'])}, expected {COLUMNS}: record the trace again")
            for at, line in enumerate(value["calls"]):
                try:
                    if len(line) != len(COLUMNS):
                        raise InputError(f"expected {len(COLUMNS)} integers, {', '.join(COLUMNS)}")
                    *numbers, calls = line
                    trace.calls[_size(*numbers)] += integer("calls", calls)
                except DAMAGED as error:
                    raise InputError(f"calls[{at}] is {quoted(line)}: {error}") from error
            trace.squares = integer("squares", value["squares"], zero=True, most=LARGEST**2)
            trace.costs = None if value["costs"] is None else Costs.from_json(value["costs"])
        except DAMAGED as error:
            raise InputError(f"{path} is not a trace ({error!r}): expected a file from `Trace.save`") from error
        return trace

    def __len__(self) -> int:
        return self.calls.total()

    def __repr__(self) -> str:
        return f"Trace({counted(len(self), 'call')} of {counted(len(self.calls), 'size')})"


def _size(rows: object, items: object, segments: object, longest: object, largest: object) -> Size:
    """Check the size of a call read from a file."""
    size = Size(
        integer("rows", rows, most=LARGEST),
        integer("items", items, most=LARGEST),
        integer("segments", segments, zero=True, most=LARGEST),  # 0 if the encoder declares none
        integer("longest", longest, zero=True, most=LARGEST),
        integer("largest", largest, most=LARGEST),
    )
    if not size.longest <= size.largest <= size.rows <= size.largest * size.items:
        raise InputError(f"{size}: expected longest <= largest <= rows <= largest * items")
    if max(size.items, size.segments) > size.rows:
        raise InputError(f"{size}: expected no more items, and no more segments, than rows")
    return size
