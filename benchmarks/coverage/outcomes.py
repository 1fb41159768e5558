"""What became of a model under `vg.wrap`, in a word."""

from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-3
"""Relative L2 within which outputs are equal, in float32 on the tape."""

Row = dict[str, Any]


def state(row: Row) -> str:
    """What became of a row of the table."""
    if not row.get("built", True):
        return "not built"
    if not row.get("called", True):
        return "not called"
    if not row["found"]:
        return "no tower" if "has no tower:" in row["why"] else "refused"
    if not row["error"] < TOLERANCE:
        return "wrong"
    return "eager" if row["eager"] or not row["replays"] else "replayed"


def outcome(rows: Sequence[Row]) -> str:
    """What became of a model: `"replayed"` in all of its towers, `"replayed in part"`, or the state of all towers."""
    states = {state(row) for row in rows}
    if "wrong" in states:
        return "wrong"
    if "replayed" in states and len(states) > 1:
        return "replayed in part"
    return next(each for each in ("eager", "refused", *states) if each in states)
