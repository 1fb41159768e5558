"""Makes findings of what was seen."""

from collections.abc import Sequence

from varlen_graphs.doctor.declarations import declaration_for
from varlen_graphs.doctor.findings import NATURES, Finding, collapse
from varlen_graphs.doctor.runs import Sighting
from varlen_graphs.watch.lines import Line

MANY = 3
"""Different things that one line did are told up to so many."""


def gather(per_call: Sequence[Sequence[Sighting]]) -> tuple[Finding, ...]:
    """One finding for each kind and line that was seen; what stands in the way first.

    Args:
        per_call: What was seen, call by call.
    """
    merged: dict[tuple[str, Line], list[list[Sighting]]] = {}
    for sightings in per_call:
        own: dict[tuple[str, Line], list[Sighting]] = {}
        for sighting in sightings:
            own.setdefault((sighting.kind, sighting.line), []).append(sighting)
        for key, parts in own.items():
            merged.setdefault(key, []).append(parts)
    findings = [_finding(*key, parts) for key, parts in merged.items()]
    return tuple(sorted(findings, key=lambda finding: not finding.blocks))


def _finding(kind: str, line: Line, seen: list[list[Sighting]]) -> Finding:
    nature = NATURES[kind]
    whats = list(dict.fromkeys(sighting.what for own in seen for sighting in own))
    more = f"; and {len(whats) - MANY} more" if len(whats) > MANY else ""
    return Finding(
        kind=kind,
        what="; ".join(whats[:MANY]) + more,
        line=line,
        modules=collapse([sighting.module for own in seen for sighting in own]),
        why=nature.why,
        remedy=nature.remedy,
        declaration=declaration_for(kind, line, seen[0][0].module),
        count=max(len(own) for own in seen),
        blocks=nature.blocks,
    )
