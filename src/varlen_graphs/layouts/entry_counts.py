"""Number of entries of an item, as a function of its rows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError


def entries_of(of_item: Callable[[int], int], rows: int) -> int:
    """Return the number of entries of an item of so many rows.

    Raises:
        SpecError: The function raised an error, or returned no integer.
    """
    try:
        count = of_item(rows) if rows else 0
    except Exception as error:
        raise SpecError(
            f"of_item({rows}) raised {type(error).__name__}: {quoted(str(error))}; expected an integer for any number "
            "of rows: those of items, and in padded batches all up to twice the length of a budget"
        ) from error
    if not is_integer(count):
        raise SpecError(f"of_item({rows}) returned {quoted(count)}: expected an integer, the number of entries")
    return max(0, int(count))


class EntryCounts:
    """Number of entries of an item, counted by any Python function of its rows, also on the device.

    Graphs look the numbers up in tables on the device. The first use of each precedes every capture, because each
    forward runs eagerly before it is captured; they are kept. So the host keeps to what the tables hold, too.

    Args:
        of_item: Maps a number of rows to a number of entries, which never decreases. No rows have no entries, nor have
            those for which it gives a negative number.
    """

    def __init__(self, of_item: Callable[[int], int]) -> None:
        self._of_item = of_item
        self._counts: list[int] = []
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, rows: int) -> int:
        """Return the number of entries of an item; see `entries_of`."""
        return self._counts[rows] if rows < len(self._counts) else entries_of(self._of_item, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return EntryCounts, (self._of_item,)

    def lookup(self, rows: Tensor, longest: int) -> Tensor:
        """Return the number of entries of items on the device, int64 `[items]`, from their rows, at most `longest`.

        Raises:
            SpecError: An item of more rows has fewer entries.
        """
        size = 1 << longest.bit_length()  # few tables, whatever the lengths of batches
        if (size, rows.device) not in self._tables:
            with torch.inference_mode(False):
                self._tables[size, rows.device] = self._table(size).to(rows.device)
        return self._tables[size, rows.device][rows]

    def _table(self, size: int) -> Tensor:
        if size > len(self._counts):
            counts = [self(rows) for rows in range(size)]
            for rows, (own, more) in enumerate(pairwise(counts)):
                if more < own:
                    raise SpecError(
                        f"of_item({rows}) is {own}, but of_item({rows + 1}) is {more}: expected no fewer entries for "
                        "more rows"
                    )
            self._counts = counts
        return torch.tensor(self._counts[:size], device="cpu")
