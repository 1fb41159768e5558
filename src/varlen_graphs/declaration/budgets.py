"""Budgets of a declaration: the default ones, and those that a user gave in any form."""

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any, cast

from varlen_graphs.budgets.budget import ROW_ALIGNMENT, Budget, round_up
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder, PaddedLadder
from varlen_graphs.checks.fields import is_integer
from varlen_graphs.errors import BudgetError
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.usage import UsageMeter

BATCHES = (1, 2, 4, 8, 16, 32)
"""Default budgets for items of one row."""


def default_budgets(layout: LayoutArgument) -> DefaultBudgets:
    """Return the default budgets for the items that a declaration describes."""
    if layout.one_row:
        return DefaultBudgets(BATCHES)
    return DefaultBudgets(PaddedLadder() if layout.padded else Ladder())


def resolve_budgets(budgets: Budgets, multiple: int, usage: UsageMeter) -> tuple[Budget, ...]:
    """Return sorted, distinct budgets from any accepted form of `budgets`.

    Plain integers are row counts, rounded up to a multiple of `lcm(16, multiple)` like those of a `Ladder`, and get the
    segments that ordinary items need. The rows of a `Budget`, or its length in a padded batch, are rounded up to a
    multiple of `multiple` only. Capacities are never rounded down. Where each item is one row, integers are numbers of
    items, and are not rounded.
    """
    aligned, layout, per = math.lcm(ROW_ALIGNMENT, multiple), usage.layout, usage.rows_per_segment
    if layout.one_row and isinstance(budgets, Ladder):
        raise BudgetError(f"budgets is {budgets!r}: expected batch sizes for a Batch, such as [1, 2, 4, 8, 16]")
    if isinstance(budgets, Ladder):
        return tuple(sorted({budgets.budget(round_up(rows, aligned), per) for rows in budgets.row_counts()}))
    if not (is_integer(budgets) or isinstance(budgets, Iterable)) or isinstance(budgets, str | bytes):
        raise BudgetError(f"budgets is {budgets!r}: expected row counts or Budgets, or a Ladder")
    try:
        entries: list[Any] = [budgets] if isinstance(budgets, Integral | Budget) else list(cast(Iterable[Any], budgets))
    except TypeError as error:  # of a tensor without dimensions, for one
        raise BudgetError(f"budgets is {budgets!r}: expected row counts or Budgets, or a Ladder ({error})") from error
    if not entries:
        raise BudgetError("budgets is empty: expected at least one row count or Budget, or a Ladder")
    resolved = set()
    for entry in entries:
        if isinstance(entry, Budget) and layout.padded and entry.rows == entry.items * entry.max_seqlen:
            resolved.add(Budget.padded(entry.items, round_up(entry.max_seqlen, multiple)))
        elif isinstance(entry, Budget):
            rows = round_up(entry.rows, multiple)
            longest = rows if entry.max_seqlen == entry.rows else entry.max_seqlen
            resolved.add(Budget(rows, entry.items, entry.segments, longest))
        elif is_integer(entry):
            count = Budget(entry).rows
            ordinary = Ladder().budget(round_up(count, aligned), per)
            resolved.add(Budget(count, count, count, 1) if layout.one_row else ordinary)
        else:
            raise BudgetError(f"budget {entry!r} is a {type(entry).__name__}: expected an integer (rows) or a Budget")
    return tuple(sorted(resolved))
