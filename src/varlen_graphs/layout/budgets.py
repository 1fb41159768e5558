"""Budgets and ladders: how much one captured graph can hold."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from varlen_graphs.errors import BudgetError
from varlen_graphs.layout.memory_size import in_bytes, most_rows

ROW_ALIGNMENT = 16
"""Plain row counts are rounded up to a multiple of this, so that vectors of numbers begin where they can be loaded."""

PART_OF_TILE, PARTS_OF_TILES = 32, 1024
"""Up to so many rows a ladder's row counts are multiples of this: single images are that small, and a row of padding is
a large share of them."""

TILE, WHOLE_TILES = 128, 2048
"""From there on, up to so many rows, they are whole tiles of matrix products."""

SHORT_OF_TILE = 16
"""Above that they are so much short of whole tiles, where cuBLAS takes a few per cent less for a row
(docs/benchmarks.md)."""

ROWS_PER_ITEM, FEWEST_ITEMS = 64, 8
"""A budget holds an item for each so many rows unless it says more, and at least so many."""

LARGEST_STEP = 4
"""A larger ratio is a mistake: a number of rows, most likely."""


class _Capacities(NamedTuple):
    rows: int
    items: int
    segments: int
    max_seqlen: int


class Budget(_Capacities):
    """The capacity of one graph.

    Attributes:
        rows: Packed rows, padding included.
        items: Items, default `max(8, rows // 64)`.
        segments: Segments (entries of `cu_seqlens` less one), default the larger of `items` and `max(8, rows // 64)`.
        max_seqlen: Rows of the longest segment, default `rows`. Attention kernels see this number as a constant.

    Raises:
        BudgetError: A capacity below one: no item could use such a budget.
    """

    __slots__ = ()

    def __new__(
        cls, rows: int, items: int | None = None, segments: int | None = None, max_seqlen: int | None = None
    ) -> "Budget":
        """Fill in the defaults, and check the capacities."""
        typical = max(FEWEST_ITEMS, rows // ROWS_PER_ITEM) if isinstance(rows, int) else FEWEST_ITEMS
        items = typical if items is None else items
        capacities = {
            "rows": rows,
            "items": items,
            "segments": max(items, typical) if segments is None else segments,
            "max_seqlen": rows if max_seqlen is None else max_seqlen,
        }
        for name, capacity in capacities.items():
            if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
                raise BudgetError(
                    f"Budget({name}={capacity!r}): no item could use it; expected {name} to be an integer of at least 1"
                )
        return super().__new__(cls, **capacities)

    @classmethod
    def padded(cls, batch: int, length: int) -> "Budget":
        """The capacity of a graph for padded batches: up to `batch` items, each padded to `length` rows.

        Raises:
            BudgetError: One of them is below one.
        """
        return cls(cls(length).rows * cls(batch).rows, items=batch, segments=batch, max_seqlen=length)

    def holds(self, rows: int, items: int, segments: int, longest: int) -> bool:
        """Whether `items` items of together `rows` rows and `segments` segments, none over `longest`, fit."""
        return rows <= self.rows and items <= self.items and segments <= self.segments and longest <= self.max_seqlen


@dataclass(frozen=True)
class Ladder:
    """Budgets in geometric steps, from `min` to `max` rows.

    Fine steps cost no memory, because all graphs share one pool and one arena, and a tenth of a second each to capture.
    Steps of 1.04 waste about 2 % of the rows on padding, steps of 1.12 some 6 %, powers of two about a third. Between
    the ends, row counts are multiples of 32 up to 1,024, of 128 up to 2,048, and above that 16 less than those, which
    is what matrix products like.

    Attributes:
        min: Rows of the smallest budget.
        max: Rows of the largest budget.
        step: Ratio of neighbouring budgets, above 1.
        rows_per_item: A budget holds an item for each so many of its rows, and 8 at least. For short texts, say 16.
        rows_per_segment: The same for segments, of which there are never fewer than items.
        memory: What an encoder takes as its `memory=` if it is given none.
    """

    min: int = 256
    max: int = 16_384
    step: float = 1.04
    rows_per_item: int = ROWS_PER_ITEM
    rows_per_segment: int = ROWS_PER_ITEM
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise BudgetError(f"Ladder({self.min}, {self.max}): expected 1 <= min <= max")
        if self.rows_per_item < 1 or self.rows_per_segment < 1:
            raise BudgetError(f"{self}: expected rows_per_item and rows_per_segment to be at least 1")
        if not 1 < self.step <= LARGEST_STEP:
            raise BudgetError(
                f"Ladder(step={self.step}): expected the ratio of neighbouring budgets, above 1 and at most "
                f"{LARGEST_STEP}, for example 1.1"
            )

    @classmethod
    def auto(cls, memory: int | str, bytes_per_row: float | None = None) -> "Ladder":
        """The ladder up to as many rows as so much memory holds graphs for.

        `min` is lower than the default where memory holds no more. What a row takes depends on the module, and is
        measured where graphs are captured on a GPU. Without it this is the default ladder, of which an encoder captures
        all and keeps what fits: as with its `memory=`. To reach beyond the default `max`, capture once, with any
        budgets, and ask for `encoder.costs.bytes_per_row`. `dataclasses.replace` changes the rest.

        Args:
            memory: Bytes, or a text such as `"2GiB"`, for the pool and the arena.
            bytes_per_row: What these take for each row of the largest budget; `None` leaves it to the encoder.

        Raises:
            BudgetError: Not an amount of memory, or too little of it for any budget.
        """
        if bytes_per_row is None:
            in_bytes(memory)
            return cls(memory=memory)
        most = most_rows(memory, bytes_per_row, multiple=ROW_ALIGNMENT)
        return cls(min=min(cls.min, most), max=most)

    def __iter__(self) -> Iterator[Budget]:
        return map(self.budget, self.row_counts())

    def budget(self, rows: int) -> Budget:
        """The budget of so many rows."""
        items, segments = (max(FEWEST_ITEMS, rows // of) for of in (self.rows_per_item, self.rows_per_segment))
        return Budget(rows, items, max(items, segments))

    def row_counts(self) -> Iterator[int]:
        """The rows of each budget, ascending."""
        wanted, last = float(self.min), self.min
        if self.min < self.max:
            yield self.min
        while (rows := _nearest(wanted)) < self.max - SHORT_OF_TILE:
            if rows > last:
                yield rows
            wanted, last = wanted * self.step, max(rows, last)
        yield self.max


@dataclass(frozen=True)
class PaddedLadder:
    """Budgets of padded batches: every number of items, doubling up to `batch`, with every length of a ladder.

    Attributes:
        batch: The most items.
        length: The longest.
        min_batch: The fewest items.
        min_length: The shortest length.
        step: Ratio of neighbouring lengths, above 1; lengths between the ends are multiples of 16.
    """

    batch: int = 32
    length: int = 512
    min_batch: int = 1
    min_length: int = 32
    step: float = 1.25

    def __post_init__(self) -> None:
        if not (1 <= self.min_batch <= self.batch and 1 <= self.min_length <= self.length):
            raise BudgetError(f"{self}: expected 1 <= min_batch <= batch and 1 <= min_length <= length")
        if not 1 < self.step <= LARGEST_STEP:
            raise BudgetError(f"{self}: expected a step above 1 and at most {LARGEST_STEP}, for example 1.25")

    def __iter__(self) -> Iterator[Budget]:
        batches, lengths = [self.min_batch], [_round_up(self.min_length, ROW_ALIGNMENT)]
        while batches[-1] * 2 < self.batch:
            batches.append(batches[-1] * 2)
        while lengths[-1] < self.length:
            lengths.append(_round_up(math.ceil(lengths[-1] * self.step), ROW_ALIGNMENT))
        for batch in {*batches, self.batch}:
            for length in {min(length, self.length) for length in lengths}:
                yield Budget.padded(batch, length)


Budgets = Iterable[int | Budget] | Ladder | PaddedLadder | int | Budget


def resolve_budgets(budgets: Budgets, multiple: int) -> tuple[Budget, ...]:
    """Turn what a user wrote into sorted, distinct budgets.

    Plain integers mean rows, and are rounded up to a multiple of `lcm(16, multiple)` like those of a `Ladder`; the rows
    of a `Budget` are rounded up to a multiple of `multiple` alone. Capacities are never rounded down.

    Args:
        budgets: Row counts, `Budget`s, a `Ladder`, or a `PaddedLadder`.
        multiple: What every row count must be divisible by (the least common multiple of the row ratios).

    Raises:
        BudgetError: No budget at all, or an entry that is neither an integer nor a `Budget`.
    """
    aligned = math.lcm(ROW_ALIGNMENT, multiple)
    if isinstance(budgets, Ladder):
        return tuple(sorted({budgets.budget(_round_up(rows, aligned)) for rows in budgets.row_counts()}))
    if not isinstance(budgets, Iterable | int | Budget) or isinstance(budgets, str):
        raise BudgetError(f"budgets is {budgets!r}: expected row counts or Budgets, or a Ladder")
    entries = [budgets] if isinstance(budgets, int | Budget) else list(budgets)
    if not entries:
        raise BudgetError("budgets is empty: expected at least one row count or Budget, or a Ladder")
    resolved = set()
    for entry in entries:
        if isinstance(entry, Budget):
            rows = _round_up(entry.rows, multiple)
            longest = rows if entry.max_seqlen == entry.rows else entry.max_seqlen
            resolved.add(Budget(rows, entry.items, entry.segments, longest))
        elif isinstance(entry, int) and not isinstance(entry, bool):
            resolved.add(Budget(_round_up(Budget(entry).rows, aligned)))
        else:
            raise BudgetError(f"budget {entry!r} is a {type(entry).__name__}: expected an integer (rows) or a Budget")
    return tuple(sorted(resolved))


def _nearest(rows: float) -> int:
    """The nearest row count for a budget, by the size of it."""
    tile = PART_OF_TILE if rows <= PARTS_OF_TILES else TILE
    nearest = max(1, round(rows / tile)) * tile
    return nearest if nearest <= WHOLE_TILES else nearest - SHORT_OF_TILE


def row_count_for(rows: int) -> int:
    """The fewest rows, of those that a ladder takes, that hold so many."""
    tiled = _round_up(rows, PART_OF_TILE if rows <= PARTS_OF_TILES else TILE)
    return tiled if tiled <= WHOLE_TILES else _round_up(rows + SHORT_OF_TILE, TILE) - SHORT_OF_TILE


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
