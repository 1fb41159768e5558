"""What the doctor found, and how it is told."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from varlen_graphs.watch.lines import Line
from varlen_graphs.watch.rules import WHY


class Nature(NamedTuple):
    """What there is to say of a kind of findings.

    Attributes:
        why: Why it is in the way, or worth knowing.
        remedy: What to do.
        blocks: Whether a capture is refused because of it, or its replays are wrong.
    """

    why: str
    remedy: str
    blocks: bool = True


NATURES: dict[str, Nature] = {kind: Nature(why, remedy) for kind, (why, remedy) in WHY.items()} | {
    "error": Nature(
        "The run ended there: what would have followed was not looked at.",
        "Mend it, or give calls that the module takes.",
    ),
    "frozen value": Nature(
        "It is not the same for all layouts, and a graph holds the one of its capture.",
        "Declare what is computed from it as a buffer: a DeviceBuffer of tensor operations on the item table, or a "
        "HostBuffer.",
    ),
    "frozen branch": Nature(
        "What runs is not the same for all layouts, or all runs, and a graph runs what ran at its capture.",
        "Compute it for all items at once, from tensors, or declare the result as a DeviceBuffer or a HostBuffer.",
    ),
    "cache by layout": Nature(
        "It was made anew for another layout, so graphs would read what another one left, in memory that may be gone.",
        "Declare it as a buffer, or make it once, as large as it may get.",
    ),
    "state written": Nature(
        "Warm-up runs, captures and the timing of budgets write it as well, and so do rows of padding. What is put in "
        "its place is that of the capture.",
        "Keep what changes outside of the module, or call module.eval() if it is a statistic of training.",
    ),
    "padded size": Nature(
        "It follows from the number of rows or items. A graph holds that of its budget, in which padding counts.",
        "Declare what is computed from it as a DeviceBuffer of the item table or a HostBuffer, unless padding may "
        "count.",
        blocks=False,
    ),
    "lazy cache": Nature(
        "The first run made it and others read it. The warm-up makes it, so graphs find it: right if no layout counts.",
        "Make it in __init__ and register it as a buffer of the module, to be sure.",
        blocks=False,
    ),
    "kept memory": Nature(
        "The module keeps it after the run, so its memory in the pool is not shared, and later replays overwrite it.",
        "Return it as an output, or do not keep it.",
        blocks=False,
    ),
    "input written": Nature(
        "A graph has rows of its own: it changes those, and the caller's tensor stays as it was.",
        "Write into a new tensor.",
        blocks=False,
    ),
    "random numbers": Nature(
        "A graph draws new numbers at each replay, from the device's default generator, but not those of an eager run.",
        "Call module.eval() if it is dropout; otherwise pass the numbers in.",
        blocks=False,
    ),
}
"""By kind, in no order."""


@dataclass(frozen=True)
class Finding:
    """One line of code that stands in the way of a graph, or is worth knowing.

    Attributes:
        kind: What sort of thing it is, for example `"host sync"`.
        what: What the line did, in words.
        line: Where: `file`, `number`, `function` and `source`.
        modules: Paths of the submodules in which it ran, `*` for any number; the module itself is `""`.
        why: Why that is in the way.
        remedy: What to do.
        declaration: The buffer or layout to declare in its place, as the words of the line suggest it; or `None`.
        count: How many times it ran, in the call in which it ran most often.
        blocks: Whether a capture is refused because of it, or its replays are wrong.
    """

    kind: str
    what: str
    line: Line
    modules: tuple[str, ...]
    why: str
    remedy: str
    declaration: str | None
    count: int
    blocks: bool


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a module. Iterates over them; `str()` is plain text.

    Attributes:
        name: The class of the module.
        calls: How many calls were looked at.
        findings: What stands in the way, then what is worth knowing.
        notes: What could not be looked for.
    """

    name: str
    calls: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of a graph."""
        return not any(finding.blocks for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return self.text()

    def text(self, color: bool = False) -> str:
        """A page for people; `color` is for terminals."""
        paint = _paint if color else _plain
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        blocking = sum(finding.blocks for finding in self.findings)
        if self.ok:
            verdict = paint("green", "nothing stands in the way of a graph")
        else:
            stand = "findings stand" if blocking > 1 else "finding stands"
            verdict = paint("red", f"{blocking} {stand} in the way of a graph")
        others = f", {len(self) - blocking} more worth knowing" if len(self) > blocking else ""
        parts = [f"{paint('bold', self.name)}, {calls}: {verdict}{others}"]
        parts += [_finding_text(at, finding, paint) for at, finding in enumerate(self.findings, 1)]
        parts += [f"Note: {note}" for note in self.notes]
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """The same for programs."""
        findings = [
            asdict(finding) | {"line": finding.line._asdict() | {"source": finding.line.source}}
            for finding in self.findings
        ]
        return json.dumps(
            {"name": self.name, "calls": self.calls, "ok": self.ok, "findings": findings, "notes": self.notes}, indent=1
        )


def collapse(paths: Sequence[str]) -> tuple[str, ...]:
    """Paths of submodules with `*` in the place of numbers that differ, each once: `blocks.*.attn`."""
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
    lift = f"Declare {finding.declaration}." if finding.declaration else finding.remedy
    head = paint("red" if finding.blocks else "yellow", finding.kind)
    place = f"{finding.line.file}:{finding.line.number}, in {finding.line.function}"
    lines = [
        f"{at}. {head}{times}: {finding.what}",
        f"   at {place} ({where})",
        f"      {paint('cyan', finding.line.source)}",
        f"   {finding.why}",
        f"   {paint('green', lift)}",
    ]
    return "\n".join(lines)
