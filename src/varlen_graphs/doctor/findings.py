"""Findings of the doctor, and their report as text and JSON."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from varlen_graphs.doctor.branches import statement
from varlen_graphs.errors import counted
from varlen_graphs.torch_dispatch.lines import Line
from varlen_graphs.torch_dispatch.rules import EXPLANATIONS


class FindingKind(NamedTuple):
    """Facts that all findings of a kind share; see `Finding`."""

    why: str
    remedy: str
    blocks: bool = True


_CAPTURE_RULES = {kind: FindingKind(why, remedy) for kind, (why, remedy) in EXPLANATIONS.items()}

FINDING_KINDS: dict[str, FindingKind] = _CAPTURE_RULES | {
    "error": FindingKind(
        "The run ended here, so nothing after this line was examined.",
        "Fix the error, or pass calls that the module accepts.",
    ),
    "graphed encoder": FindingKind(
        "An encoder reads the layout on the host and replays graphs of its own, which no other graph can hold.",
        "Leave the module around it eager, or diagnose and graph it with the encoder's module in its place: "
        "encoder.module, or vg.unwrap(model) after vg.wrap(model).",
    ),
    "frozen value": FindingKind(
        "It differs between layouts or between runs, and a graph keeps the value of its capture.",
        "Declare what is computed from it as a buffer: a DeviceBuffer of tensor operations on the item table, or a "
        "HostBuffer.",
    ),
    "frozen branch": FindingKind(
        "The operations differ between layouts or between runs, and a graph repeats those of its capture.",
        "Compute it for all items at once, with tensor operations, or declare the result as a DeviceBuffer or a "
        "HostBuffer.",
    ),
    "cache by layout": FindingKind(
        "It was recreated for another layout, so graphs would read values of another layout, in memory that may be "
        "freed.",
        "Declare it as a buffer, or create it once, at its largest size.",
    ),
    "state written": FindingKind(
        "Warm-up runs, captures, the timing of budgets and padding rows write it as well. A tensor that replaces it "
        "stays the one of the capture.",
        "Keep changing state outside of the module, or call module.eval() if it is a training statistic.",
    ),
    "wrong replay": FindingKind(
        "A graph was replayed on the tape over synthetic items, with NaN and with other values as padding: its output "
        "is not that of the module, or changes with the padding. In use such a graph is refused, and calls run eager.",
        "Let rows mix through declared buffers only: attention over cu_seqlens, gathers by declared indices, sums by "
        "item that leave padding out. Launch Triton kernels in a torch.library.custom_op: the tape sees no others.",
    ),
    "padded size": FindingKind(
        "It follows from the number of rows or items. A graph uses the number of its budget, padding included.",
        "Declare what is computed from it as a DeviceBuffer of the item table or as a HostBuffer, unless padding may "
        "count.",
        blocks=False,
    ),
    "lazy cache": FindingKind(
        "The first run creates it and later runs read it. Warm-up creates it before the capture, so graphs read it: "
        "this is correct if it does not depend on the layout.",
        "To be safe, create it in __init__ and register it as a buffer of the module.",
        blocks=False,
    ),
    "kept memory": FindingKind(
        "The module keeps it after the run, so graphs do not share its memory, and later replays overwrite it.",
        "Return it as an output, or do not keep it.",
        blocks=False,
    ),
    "input written": FindingKind(
        "A graph modifies its own copy of the argument; the caller's tensor stays unchanged.",
        "Write into a new tensor.",
        blocks=False,
    ),
    "random numbers": FindingKind(
        "A graph draws new numbers at each replay, from the default generator of the device, and they differ from "
        "those of an eager run.",
        "Call module.eval() if it is dropout; otherwise pass the numbers in.",
        blocks=False,
    ),
}
"""Facts by kind of finding."""


@dataclass(frozen=True)
class Finding:
    """A line of code that prevents a correct graph, or is worth knowing about.

    Attributes:
        kind: Kind of finding, for example `"host sync"`.
        what: Description of what the line did.
        line: The source line: `file`, `number`, `function` and `source`.
        modules: Paths of the submodules in which it ran, with `*` for any number; the module itself is `""`.
        why: Reason why it matters.
        remedy: Suggested change.
        declaration: Buffer or layout to declare instead, guessed from the words of the line, or `None`.
        arguments: Keyword arguments that the function around the line takes instead.
        count: Number of times it ran, in the call in which it ran most often.
        blocks: True if it makes a capture fail, or its replays wrong.
    """

    kind: str
    what: str
    line: Line
    modules: tuple[str, ...]
    why: str
    remedy: str
    declaration: str | None
    arguments: tuple[str, ...]
    count: int
    blocks: bool


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a module. Iterating yields the findings; `str()` gives plain text.

    Attributes:
        name: Class name of the module.
        calls: Number of calls that were examined.
        findings: The findings, blocking ones first.
        notes: Checks that could not be made.
        summary: Declaration to paste, or the recipe that has it; empty if nothing prevents a correct graph.
    """

    name: str
    calls: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    summary: str

    @property
    def ok(self) -> bool:
        """True if no finding prevents a correct graph."""
        return not any(finding.blocks for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return self.text()

    def text(self, color: bool = False) -> str:
        """Return the report as text, with ANSI colours if `color` is True."""
        paint = _paint if color else _plain
        calls = counted(self.calls, "call")
        blocking = sum(finding.blocks for finding in self.findings)
        if self.ok:
            verdict = paint("green", "nothing prevents a correct graph")
        else:
            prevent = "findings prevent" if blocking > 1 else "finding prevents"
            verdict = paint("red", f"{blocking} {prevent} a correct graph")
        others = f", {len(self) - blocking} more worth knowing" if len(self) > blocking else ""
        parts = [f"{paint('bold', self.name)}, {calls}: {verdict}{others}"]
        parts += [_finding_text(at, finding, paint) for at, finding in enumerate(self.findings, 1)]
        parts += [f"Note: {note}" for note in self.notes]
        parts += [self.summary] if self.summary else []
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """Return the report as JSON."""
        findings = [
            asdict(finding) | {"line": finding.line._asdict() | {"source": finding.line.source}}
            for finding in self.findings
        ]
        return json.dumps(
            {
                "name": self.name,
                "calls": self.calls,
                "ok": self.ok,
                "findings": findings,
                "notes": self.notes,
                "summary": self.summary,
            },
            indent=1,
        )


def collapse(paths: Sequence[str]) -> tuple[str, ...]:
    """Merge paths of submodules that differ in numbers only: `blocks.*.attn`."""
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path)
    return tuple(pattern if len(own) > 1 else own[0] for pattern, own in groups.items())


_COLORS = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def _paint(color: str, text: str) -> str:
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m"


def _plain(color: str, text: str) -> str:
    return text


def _finding_text(at: int, finding: Finding, paint: Callable[[str, str], str]) -> str:
    times = f", {finding.count} times a call" if finding.count > 1 else ""
    where = ", ".join(path or "the module itself" for path in finding.modules)
    advice = f"Declare {finding.declaration}." if finding.declaration else finding.remedy
    if finding.arguments:
        advice = (
            f"Pass {', '.join(finding.arguments)}, precomputed; as a buffer: {finding.declaration or 'DeviceBuffer'}."
        )
    head = paint("red" if finding.blocks else "yellow", finding.kind)
    place = f"{finding.line.file}:{finding.line.number}, in {finding.line.function}"
    lines = [
        f"{at}. {head}{times}: {finding.what}",
        f"   at {place} ({where})",
        f"      {paint('cyan', statement(finding.line))}",
        f"   {finding.why}",
        f"   {paint('green', advice)}",
    ]
    return "\n".join(lines)
