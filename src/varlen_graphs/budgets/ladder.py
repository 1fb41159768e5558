"""Ladders: budgets of many sizes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real

from varlen_graphs.budgets.budget import LARGEST, MIN_ITEMS, ROW_ALIGNMENT, ROWS_PER_ITEM, Budget, round_up
from varlen_graphs.budgets.memory_size import in_bytes, most_rows
from varlen_graphs.checks.fields import check_at_least, check_fields
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import BudgetError

SMALL_STEP, SMALL_ROWS = 32, 1024
"""Up to `SMALL_ROWS` rows, row counts of a ladder are multiples of `SMALL_STEP`: single images are that small, and each
padding row is a large share of them."""

HALF_TILE, TILE_MARGIN = 64, 16
"""Above that, they are `TILE_MARGIN` less than a multiple of `HALF_TILE`: cuBLAS takes a few per cent less time per row
a little short of whole tiles of 128, and hardly more in between (docs/benchmarks.md)."""

MAX_STEP = 4
"""Largest accepted ratio of neighbouring budgets: a larger one is most likely a number of rows."""


@dataclass(frozen=True)
class Ladder:
    """Budgets in geometric steps, from `min` to `max` rows.

    Fine steps cost no memory, because all graphs share one pool and one arena; each graph takes about a tenth of a
    second to capture, check and time. Steps of 1.05 waste about 3 % of the rows of single items on padding, steps of
    1.02 about 2 % and of 1.12 about 6 %, powers of two about a quarter. A row costs some per cent more in one budget
    than in the next, by how many tiles its matrix products have; fine steps leave a good one near any size, and calls
    use the cheapest that was measured. Between the ends, row counts are multiples of 32 up to 1,024, and above that 16
    less than a multiple of 64.

    Attributes:
        min: Rows of the smallest budget.
        max: Rows of the largest budget.
        step: Ratio of neighbouring budgets, above 1 and at most 4.
        rows_per_item: A budget of `rows` rows holds `rows // rows_per_item` items, and at least 8; `None` is 64. Use a
            smaller number, such as 16, for short texts.
        rows_per_segment: Likewise for segments; `None` is a quarter of a window where windows are segments, which is
            enough for any but the narrowest strips. A budget never holds fewer segments than items.
        memory: Default for the `memory=` of an encoder with this ladder: bytes, or a string such as `"2GiB"`.

    Raises:
        BudgetError: `min`, `max`, `step` or a ratio is out of range or no number, or `memory` is no amount of memory.
    """

    min: int = 256
    max: int = 16_384
    step: float = 1.05
    rows_per_item: int | None = None
    rows_per_segment: int | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, BudgetError)
        if not 1 <= self.min <= self.max <= LARGEST:
            raise BudgetError(f"Ladder({self.min}, {self.max}): expected 1 <= min <= max, and fewer than 2**31 rows")
        given = [name for name in ("rows_per_item", "rows_per_segment") if getattr(self, name) is not None]
        check_at_least(self, 1, *given, error=BudgetError)
        if self.memory is not None:
            in_bytes(self.memory)
        if not 1 < self.step <= MAX_STEP:
            raise BudgetError(
                f"Ladder(step={self.step}): expected the ratio of neighbouring budgets, above 1 and at most "
                f"{MAX_STEP}, for example 1.1"
            )

    @classmethod
    def auto(cls, memory: int | str, bytes_per_row: float | None = None) -> "Ladder":
        """Return the ladder whose graphs fit into `memory`.

        `max` is the largest row count that fits; `min` is its default, or `max` if that is smaller. The memory per row
        depends on the module; captures on a GPU measure it as `encoder.costs.bytes_per_row`. Without it, the result is
        the default ladder with `memory` set: an encoder captures all of its budgets and keeps those that fit. To go
        beyond the default `max`, capture once with any budgets and pass the measured value. Use `dataclasses.replace`
        to change other attributes.

        Args:
            memory: Memory for the pool and the arena: bytes, or a string such as `"2GiB"`.
            bytes_per_row: Bytes of pool and arena per row of the largest budget; `None` leaves it to the encoder.

        Raises:
            BudgetError: `memory` is not an amount of memory, or too little for any budget, or `bytes_per_row` is not
                above 0.
        """
        if bytes_per_row is not None and not (isinstance(bytes_per_row, Real) and 0 < bytes_per_row < math.inf):
            raise BudgetError(f"bytes_per_row={quoted(bytes_per_row)}: expected a number above 0, or None")
        if bytes_per_row is None:
            in_bytes(memory)
            return cls(memory=memory)
        most = min(most_rows(memory, bytes_per_row, multiple=ROW_ALIGNMENT), LARGEST // ROW_ALIGNMENT * ROW_ALIGNMENT)
        return cls(min=min(cls.min, most), max=most)

    def __iter__(self) -> Iterator[Budget]:
        return map(self.budget, self.row_counts())

    def budget(self, rows: int, rows_per_segment: int = ROWS_PER_ITEM) -> Budget:
        """Return the budget with `rows` rows; `rows_per_segment` is the number of those that the ladder leaves open."""
        per = self.rows_per_item or ROWS_PER_ITEM, self.rows_per_segment or rows_per_segment
        items, segments = (max(MIN_ITEMS, rows // each) for each in per)
        return Budget(rows, items, max(items, segments))

    def row_counts(self) -> Iterator[int]:
        """Iterate over the row counts of the budgets, ascending."""
        target, last = float(self.min), self.min
        if self.min < self.max:
            yield self.min
        while (rows := _nearest(target)) < self.max - TILE_MARGIN:
            if rows > last:
                yield rows
            target, last = target * self.step, max(rows, last)
        yield self.max


@dataclass(frozen=True)
class PaddedLadder:
    """Budgets of padded batches: each batch size combined with each length.

    Batch sizes double from `min_batch` up to `batch`. Lengths grow in geometric steps from `min_length` up to `length`.

    Attributes:
        batch: Largest number of items.
        length: Largest length, in rows.
        min_batch: Smallest number of items.
        min_length: Smallest length, in rows.
        step: Ratio of neighbouring lengths, above 1 and at most 4; all lengths but `length` are multiples of 16.

    Raises:
        BudgetError: `step` or one of the ends is out of range, or no number.
    """

    batch: int = 32
    length: int = 512
    min_batch: int = 1
    min_length: int = 32
    step: float = 1.25

    def __post_init__(self) -> None:
        check_fields(self, BudgetError)
        if not (1 <= self.min_batch <= self.batch and 1 <= self.min_length <= self.length <= LARGEST // self.batch):
            raise BudgetError(
                f"{self}: expected 1 <= min_batch <= batch and 1 <= min_length <= length, and fewer than 2**31 rows"
            )
        if not 1 < self.step <= MAX_STEP:
            raise BudgetError(f"{self}: expected a step above 1 and at most {MAX_STEP}, for example 1.25")

    def __iter__(self) -> Iterator[Budget]:
        batches, lengths = [self.min_batch], [round_up(self.min_length, ROW_ALIGNMENT)]
        while batches[-1] * 2 < self.batch:
            batches.append(batches[-1] * 2)
        while lengths[-1] < self.length:
            lengths.append(round_up(math.ceil(lengths[-1] * self.step), ROW_ALIGNMENT))
        for batch in {*batches, self.batch}:
            for length in {min(length, self.length) for length in lengths}:
                yield Budget.padded(batch, length)


Budgets = Iterable[int | Budget] | Ladder | PaddedLadder | int | Budget


@dataclass(frozen=True)
class DefaultBudgets:
    """Budgets that nobody asked for: an encoder leaves out those of them that take too much memory or time.

    Attributes:
        budgets: Any form of budgets.
    """

    budgets: Budgets

    def __iter__(self) -> Iterator[int | Budget]:
        return iter([self.budgets] if isinstance(self.budgets, int | Budget) else self.budgets)


def _nearest(rows: float) -> int:
    """Round to a row count of a ladder nearby: above `SMALL_ROWS` less than the nearest multiple of `HALF_TILE`."""
    if rows <= SMALL_ROWS:
        return max(1, round(rows / SMALL_STEP)) * SMALL_STEP
    return max(round(rows / HALF_TILE), SMALL_ROWS // HALF_TILE + 1) * HALF_TILE - TILE_MARGIN


def row_count_for(rows: int) -> int:
    """Return the smallest row count of a ladder that is at least `rows`."""
    if rows <= SMALL_ROWS:
        return round_up(rows, SMALL_STEP)
    return round_up(rows + TILE_MARGIN, HALF_TILE) - TILE_MARGIN
