"""Merging of occurrences into findings, with suggestions of buffers to declare."""

import re
from collections.abc import Sequence

from varlen_graphs.doctor.branches import statement, statement_lines
from varlen_graphs.doctor.findings import FINDING_KINDS, Finding, collapse
from varlen_graphs.doctor.keywords import precomputed_arguments
from varlen_graphs.doctor.run_record import Occurrence
from varlen_graphs.torch_dispatch.lines import Line

MAX_DESCRIPTIONS = 3
"""A finding lists up to this many different descriptions."""

_DECLARATIONS = {
    r"window_(index|attn|seqlens)|reverse_ind": "WindowIndex(Windows(side)) and CuSeqlens(per=Windows(side))",
    r"block_?(\w+_mask|diag|mask)|mask\[.*(cu_?seq|start|end)": (
        "CuSeqlens, and call vg.varlen_attention with it, not a mask"
    ),
    r"bucket": "a DeviceBuffer of torch.bucketize over the positions of the item table",
    r"max_?(seq)?_?len|max_length|longest|\.max\(|\bmax\(": "MaxSeqlen",
    r"cu_?seq|seq_?lens": "CuSeqlens",
    r"interpolat|bilinear|bicubic|upsample|resample": "Interpolation",
    r"rot(ary)?_|_rot|rope|freqs": "RotaryTable",
    r"pos(ition)?_?ids|coordinates": "GridPositions (of grids) or RowPositions (of lengths)",
    r"(padding|attention|sdpa)_mask(?!=None)": "the layout vg.Mask, with the buffer AttentionMask or Mask",
    r"attn|attention": "CuSeqlens, and call vg.varlen_attention with it",
}
"""Declaration by pattern, most specific first."""

_REPLACEABLE = {
    "host sync", "branch", "copy to host", "copy to device", "host tensor", "data-dependent shape", "frozen value",
    "frozen branch", "cache by layout",
}  # fmt: skip
"""Kinds of findings that a buffer can resolve."""


_FROZEN = ("frozen value", "frozen branch")

_CAUSES = ("host sync", "branch", "copy to host", "copy to device", "frozen branch")
"""Kinds of findings that explain what a graph would freeze in the same statement; the last if there is no other."""

_Key = tuple[str, tuple[str, int, int]]
"""Kind of finding, and the statement: its file, first and last line."""


def merge_findings(per_call: Sequence[Sequence[Occurrence]]) -> tuple[Finding, ...]:
    """Return one finding per kind and statement, blocking ones first.

    What is frozen in a statement that also reads a tensor on the host, or branches, is part of that finding.
    """
    merged: dict[_Key, list[list[Occurrence]]] = {}
    for occurrences in per_call:
        own: dict[_Key, list[Occurrence]] = {}
        for occurrence in occurrences:
            place = occurrence.line.file, *statement_lines(occurrence.line)
            own.setdefault((occurrence.kind, place), []).append(occurrence)
        for key, parts in own.items():
            merged.setdefault(key, []).append(parts)
    causes: dict[tuple[str, int, int], _Key] = {}
    for key in sorted((key for key in merged if key[0] in _CAUSES), key=lambda key: key[0] in _FROZEN):
        causes.setdefault(key[1], key)
    frozen = [key for key in merged if key[0] in _FROZEN and causes.get(key[1], key) != key]
    consequences: dict[_Key, list[list[Occurrence]]] = {}
    for key in sorted(frozen, key=lambda key: key[0]):  # branches first
        consequences.setdefault(causes[key[1]], []).extend(merged.pop(key))
    findings = [_finding(kind, parts, consequences.get((kind, place), [])) for (kind, place), parts in merged.items()]
    return tuple(sorted(findings, key=lambda finding: not finding.blocks))


def _finding(kind: str, calls: list[list[Occurrence]], consequences: list[list[Occurrence]]) -> Finding:
    facts, line = FINDING_KINDS[kind], calls[0][0].line
    descriptions = list(dict.fromkeys(occurrence.what for own in [*calls, *consequences] for occurrence in own))
    omitted = len(descriptions) - MAX_DESCRIPTIONS
    arguments = tuple(precomputed_arguments(line)) if kind in _REPLACEABLE else ()
    return Finding(
        kind=kind,
        what="; ".join(descriptions[:MAX_DESCRIPTIONS]) + (f"; and {omitted} more" if omitted > 0 else ""),
        line=line,
        modules=collapse([occurrence.module for own in [*calls, *consequences] for occurrence in own]),
        why=facts.why,
        remedy=facts.remedy,
        declaration=_declaration(kind, line, calls[0][0].module),
        arguments=arguments,
        count=max(len(own) for own in calls),
        blocks=facts.blocks,
    )


def _declaration(kind: str, line: Line, module: str) -> str | None:
    """Suggest what to declare instead of a line, from the name of its function, its source and its submodule's path."""
    if kind in _REPLACEABLE:
        for words in (line.function, statement(line), module):
            for pattern, declaration in _DECLARATIONS.items():
                if re.search(pattern, words):
                    return declaration
        if re.search(r"return .*\bsplit\(", statement(line)):
            return "the output as Rows(), in one tensor; vg.outputs.Items() gives one entry an item"
    return None
