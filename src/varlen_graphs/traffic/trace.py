"""The sizes of the calls that an encoder got."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from varlen_graphs.errors import InputError
from varlen_graphs.files import integer, write_whole
from varlen_graphs.routing.costs import Costs


class Size(NamedTuple):
    """The size of a call.

    Attributes:
        rows: Rows of all items.
        items: Items.
        segments: Segments.
        longest: Rows of the longest segment.
        largest: Rows of the largest item or group, which no replay parts.
    """

    rows: int
    items: int
    segments: int
    longest: int
    largest: int


COLUMNS = [*Size._fields, "calls"]
"""What a file says of calls."""


class Trace:
    """How many calls of each size there were. Of what was in them nothing is kept.

    It grows with the number of different sizes, not with that of calls.

    Attributes:
        calls: Calls by their sizes.
        squares: The sum of squared segment lengths over all calls, which the time of attention follows. Calls whose
            items only the GPU has seen are not in it.
    """

    def __init__(self, costs: Costs | Callable[[], Costs] | None = None) -> None:
        self.calls: Counter[Size] = Counter()
        self.squares = 0
        self._costs = costs
        self._lock = Lock()

    @property
    def costs(self) -> Costs | None:
        """What replays cost where the calls came from, as known now, or at the end of the recording."""
        return self._costs() if callable(self._costs) else self._costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._costs = costs

    def count(self, size: Size, squares: int = 0) -> None:
        """Count a call."""
        with self._lock:
            self.calls[size] += 1
            self.squares += squares

    def copy(self) -> "Trace":
        """The trace as it is now, which later calls do not change."""
        with self._lock:
            now = Trace(self.costs)
            now.calls.update(self.calls)
            now.squares = self.squares
        return now

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, in place of what is there only once it is whole. Calls may go on meanwhile.

        Costs are written as far as they were measured by then.
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
        """Read what `save` wrote.

        Raises:
            InputError: It is no such file.
        """
        trace = cls()
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["columns"] != COLUMNS:
                raise InputError(f"columns are {value['columns']}, and not {COLUMNS}: record again")
            for *numbers, calls in value["calls"]:
                trace.calls[_size(*numbers)] += integer("calls", calls)
            trace.squares = integer("squares", value["squares"], zero=True)
            trace.costs = None if value["costs"] is None else Costs.from_json(value["costs"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no trace ({error!r}): expected what `Trace.save` wrote") from error
        return trace

    def __len__(self) -> int:
        return self.calls.total()

    def __repr__(self) -> str:
        return f"Trace({len(self)} calls of {len(self.calls)} sizes)"


def _size(rows: object, items: object, segments: object, longest: object, largest: object) -> Size:
    """The size of a call, out of a file."""
    size = Size(
        integer("rows", rows),
        integer("items", items),
        integer("segments", segments, zero=True),  # not every encoder declares some
        integer("longest", longest, zero=True),
        integer("largest", largest),
    )
    if not size.longest <= size.largest <= size.rows <= size.largest * size.items:
        raise InputError(f"{size}: expected longest <= largest <= rows <= largest * items")
    return size
