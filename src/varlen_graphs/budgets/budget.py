"""The capacity of one graph."""

from typing import NamedTuple

from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import BudgetError

ROW_ALIGNMENT = 16
"""Plain row counts are rounded up to a multiple of this, so that kernels can use aligned vector loads."""

ROWS_PER_ITEM, MIN_ITEMS = 64, 8
"""By default a budget holds one item per `ROWS_PER_ITEM` rows, and at least `MIN_ITEMS`."""

LARGEST = 2**31 - 1
"""Largest capacity of a budget: kernels count in 32 bits."""


class _Capacities(NamedTuple):
    rows: int
    items: int = 0
    segments: int = 0
    max_seqlen: int = 0


class Budget(_Capacities):  # a tuple, whose hash and order cost no Python call
    """The capacity of one graph.

    Attributes:
        rows: Number of packed rows, padding included.
        items: Number of items, default `max(8, rows // 64)`.
        segments: Number of segments (`len(cu_seqlens) - 1`), default the larger of `items` and `max(8, rows // 64)`.
        max_seqlen: Rows of the longest segment, default `rows`. Attention kernels see this number as a constant.

    Raises:
        BudgetError: A capacity is not an integer of at least 1 and below 2**31.
    """

    __slots__ = ()

    def __new__(
        cls, rows: int, items: int | None = None, segments: int | None = None, max_seqlen: int | None = None
    ) -> "Budget":
        """Fill in the defaults, and check the capacities."""
        typical = max(MIN_ITEMS, rows // ROWS_PER_ITEM) if is_integer(rows) else MIN_ITEMS
        items = typical if items is None else items
        segments = (max(items, typical) if is_integer(items) else typical) if segments is None else segments
        max_seqlen = rows if max_seqlen is None else max_seqlen
        capacities = {"rows": rows, "items": items, "segments": segments, "max_seqlen": max_seqlen}
        for name, capacity in capacities.items():
            if not is_integer(capacity) or capacity < 1:
                raise BudgetError(
                    f"Budget({name}={quoted(capacity)}): no item could use it; expected {name} to be an integer of at "
                    "least 1"
                )
            if capacity > LARGEST:
                raise BudgetError(
                    f"Budget({name}={quoted(capacity)}): expected {name} to be below 2**31, because kernels count in 32"
                    " bits; take the largest call that comes, such as 16_384 rows, as the largest budget"
                )
        return super().__new__(cls, *map(int, capacities.values()))

    @classmethod
    def padded(cls, batch: int, length: int) -> "Budget":
        """Return the budget of a graph for padded batches: up to `batch` items, each padded to `length` rows.

        Raises:
            BudgetError: `batch` or `length` is not an integer of at least 1, or their product is not below 2**31.
        """
        return cls(cls(length).rows * cls(batch).rows, items=batch, segments=batch, max_seqlen=length)

    def holds(self, rows: int, items: int, segments: int, longest: int) -> bool:
        """Return True if `items` items with `rows` rows and `segments` segments of at most `longest` rows fit."""
        return rows <= self.rows and items <= self.items and segments <= self.segments and longest <= self.max_seqlen


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
