"""The sizes of the calls that an encoder got."""

import json
import os
from collections import Counter
from pathlib import Path
from threading import Lock

from varlen_graphs.costs import Costs
from varlen_graphs.errors import InputError
from varlen_graphs.files import integer, write_whole
from varlen_graphs.packing import Load


class Trace:
    """How many calls of each size there were. Of what was in them nothing is kept.

    It grows with the number of different sizes, not with that of calls.

    Attributes:
        calls: Calls by what they need of a budget: rows, items, segments, and rows of the longest segment.
        squares: The sum of squared segment lengths over all calls, which the time of attention follows. Calls whose
            items only the GPU has seen are not in it.
        costs: What replays cost where the calls came from, as known when the recording began, and when it ended.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self.calls: Counter[Load] = Counter()
        self.squares = 0
        self.costs = costs
        self._lock = Lock()

    def count(self, load: Load, squares: int = 0) -> None:
        """Count a call."""
        with self._lock:
            self.calls[load] += 1
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

        Costs are written if they were measured.
        """
        now = self.copy()
        value = {
            "columns": [*Load._fields, "calls"],
            "calls": [[*load, count] for load, count in sorted(now.calls.items())],
            "squares": now.squares,
            "costs": now.costs.as_json() if now.costs and now.costs.measured else None,
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
            for *sizes, calls in value["calls"]:
                trace.calls[_load(*sizes)] += integer("calls", calls)
            trace.squares = integer("squares", value["squares"], zero=True)
            trace.costs = None if value["costs"] is None else Costs.from_json(value["costs"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no trace ({error!r}): expected what `Trace.save` wrote") from error
        return trace

    def __len__(self) -> int:
        return self.calls.total()

    def __repr__(self) -> str:
        return f"Trace({len(self)} calls of {len(self.calls)} sizes)"


def _load(rows: object, items: object, segments: object, longest: object) -> Load:
    """What a call needs, out of a file: segments are not always declared."""
    return Load(
        integer("rows", rows),
        integer("items", items),
        integer("segments", segments, zero=True),
        integer("longest", longest, zero=True),
    )
