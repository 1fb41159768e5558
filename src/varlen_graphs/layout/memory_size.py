"""How much memory graphs may take, and how large that lets budgets be."""

import re

from varlen_graphs.errors import BudgetError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

SCRATCH = 64 << 20
"""Bytes that graphs may hold however few rows they have: cuBLAS's scratch for a stream, 32 MiB on an H200, and what
torch's allocator rounds up, some 25 MiB for an encoder of 27 blocks."""


def in_bytes(memory: int | str) -> int:
    """An amount of memory in bytes: a number of them, or a text such as `"2GiB"` or `"1.5 GB"`.

    Raises:
        BudgetError: It is none.
    """
    units = {unit.upper(): size for unit, size in UNITS.items()}
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)?", str(memory).upper())
    if parts is None or (parts[2] or "B") not in units:
        raise BudgetError(
            f"memory {memory!r}: expected a number of bytes, or one with a unit, such as '2GiB'; units are "
            f"{', '.join(UNITS)}"
        )
    return int(float(parts[1]) * units[parts[2] or "B"])


def most_rows(memory: int | str, bytes_per_row: float, multiple: int) -> int:
    """The rows of the largest budget whose graphs, and those of all smaller ones, fit into so much memory.

    Graphs share one pool and one arena, which are those of the largest budget, and grow with its rows. Not quite in
    proportion, so `SCRATCH` is kept free for what does not.

    Args:
        memory: Bytes, or a text such as `"2GiB"`.
        bytes_per_row: What pool and arena take for each row of the largest budget.
        multiple: What the rows are divisible by.

    Raises:
        BudgetError: Not an amount of memory, or too little of it for any budget.
    """
    rows = int((in_bytes(memory) - SCRATCH) / bytes_per_row) // multiple * multiple
    if rows < 1:
        raise BudgetError(
            f"{memory} of memory hold no graph: expected {SCRATCH >> 20} MiB of scratch memory and enough for "
            f"{multiple} rows, each of which takes {bytes_per_row:,.0f} bytes"
        )
    return rows
