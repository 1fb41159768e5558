"""The tables of docs/appendix-coverage.md."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.common import table
from benchmarks.coverage.classes import KNOWN
from benchmarks.coverage.outcomes import Row, outcome, state

LONGEST = 220
"""Characters of a reason that a table shows; the JSON has all."""

OUTCOMES = ("replayed", "replayed in part", "eager", "refused", "wrong", "not called", "no tower", "not built")
RARE = ("not called",)
"""Outcomes that a table shows where there are some."""


def models(result: dict[str, Any]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield group, name and rows of each model."""
    for (group, name), rows in groupby(result["rows"], key=lambda row: (row["group"], row["model"])):
        yield group, name, list(rows)


def counts(result: dict[str, Any]) -> str:
    """Numbers of models by their outcomes."""
    by_group: dict[str, Counter[str]] = {}
    best_known = {name for names in KNOWN.values() for name in names}
    for group, name, rows in models(result):
        for each in (group, *(["of these, the forty best known"] if name in best_known else [])):
            by_group.setdefault(each, Counter())[outcome(rows)] += 1
    shown = [each for each in OUTCOMES if each not in RARE or any(found[each] for found in by_group.values())]
    lines = [(group, sum(found.values()), *(found[each] for each in shown)) for group, found in by_group.items()]
    return table((f"transformers {result['transformers']}", "classes", *shown), lines)


def rows(result: dict[str, Any]) -> str:
    """A line for each tower of each model."""
    lines = [
        (f"`{row['model']}`", row["modality"], _how(row), state(row), _error(row), _why(row))
        for row in result["rows"]
        if row["found"] or row["why"]
    ]
    return table(("model", "called by, or tower", "found by", "outcome", "error", "why"), lines)


def _how(row: Row) -> str | None:
    return ", ".join(dict.fromkeys((row["found"] or {}).values())) or None


def _error(row: Row) -> str | None:
    return f"{row['error']:.0e}" if row["found"] else None


def _why(row: Row) -> str | None:
    if state(row) == "no tower":
        return None
    said = row["why"] if not row["found"] else "; ".join(row["eager"])
    text = re.sub(r"\s+", " ", said).replace("|", "\\|").replace("<", "\\<")
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]}...") or None
