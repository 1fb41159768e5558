"""Merging of occurrences into findings."""

from collections.abc import Sequence

from varlen_graphs.doctor.declarations import suggest_declaration
from varlen_graphs.doctor.findings import FINDING_KINDS, Finding, collapse
from varlen_graphs.doctor.run_record import Occurrence
from varlen_graphs.watch.lines import Line

MAX_DESCRIPTIONS = 3
"""A finding lists up to this many different descriptions."""


def merge_findings(per_call: Sequence[Sequence[Occurrence]]) -> tuple[Finding, ...]:
    """Return one finding per kind and line, blocking ones first.

    Args:
        per_call: Occurrences, call by call.
    """
    merged: dict[tuple[str, Line], list[list[Occurrence]]] = {}
    for occurrences in per_call:
        own: dict[tuple[str, Line], list[Occurrence]] = {}
        for occurrence in occurrences:
            own.setdefault((occurrence.kind, occurrence.line), []).append(occurrence)
        for key, parts in own.items():
            merged.setdefault(key, []).append(parts)
    findings = [_finding(*key, parts) for key, parts in merged.items()]
    return tuple(sorted(findings, key=lambda finding: not finding.blocks))


def _finding(kind: str, line: Line, calls: list[list[Occurrence]]) -> Finding:
    facts = FINDING_KINDS[kind]
    descriptions = list(dict.fromkeys(occurrence.what for own in calls for occurrence in own))
    omitted = len(descriptions) - MAX_DESCRIPTIONS
    return Finding(
        kind=kind,
        what="; ".join(descriptions[:MAX_DESCRIPTIONS]) + (f"; and {omitted} more" if omitted > 0 else ""),
        line=line,
        modules=collapse([occurrence.module for own in calls for occurrence in own]),
        why=facts.why,
        remedy=facts.remedy,
        declaration=suggest_declaration(kind, line, calls[0][0].module),
        count=max(len(own) for own in calls),
        blocks=facts.blocks,
    )
