"""Amounts of memory, and the row counts whose graphs fit into them."""

import re

from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import BudgetError, counted

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

SCRATCH = 64 << 20
"""Bytes that graphs may hold regardless of their rows: cuBLAS workspace per stream, 32 MiB on an H200, and rounding in
torch's allocator, about 25 MiB for an encoder of 27 blocks."""


def in_bytes(memory: int | str) -> int:
    """Convert an amount of memory, a number of bytes or a string such as `"2GiB"` or `"1.5 GB"`, to bytes."""
    units = {unit.upper(): size for unit, size in UNITS.items()}
    if is_integer(memory) and int(memory) >= 0:
        return int(memory)
    expected = f"expected a number of bytes, or one with a unit, such as '2GiB'; units are {', '.join(UNITS)}"
    parts = re.fullmatch(r"(\d{1,40})(\.\d{1,40})? ?([^\W\d]+)?", memory, re.ASCII) if isinstance(memory, str) else None
    if parts is None:
        raise BudgetError(f"memory {quoted(memory)}: {expected}")
    unit = parts[3] or "B"
    if unit.upper() not in units:
        raise BudgetError(f"memory {quoted(memory)} has the unit {quoted(unit)}: {expected}")
    return int(parts[1]) * units[unit.upper()] + int(float(parts[2] or 0) * units[unit.upper()])


def most_rows(memory: int | str, bytes_per_row: float, multiple: int) -> int:
    """Return the rows of the largest budget whose graphs, and those of all smaller budgets, fit into `memory`."""
    # Graphs share one pool and one arena, sized by the largest budget: only `SCRATCH` does not grow with its rows.
    rows = int((in_bytes(memory) - SCRATCH) / bytes_per_row) // multiple * multiple
    if rows < 1:
        raise BudgetError(
            f"memory {memory!r} is too little for any graph: expected {SCRATCH >> 20} MiB of scratch memory plus "
            f"{counted(multiple, 'row')} of {bytes_per_row:,.0f} bytes; pass a larger amount"
        )
    return rows
