"""The tables of docs/appendix-coverage.md, and the CSV files beside it, which have a row for each tower."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common import csv_text, table
from benchmarks.coverage.classes import KNOWN
from benchmarks.coverage.outcomes import Row, outcome, state

RESULTS = ("coverage", "coverage_5_23", "coverage_5_17", "coverage_4_57", "coverage_without_recipes")
"""The JSON files behind coverage.csv."""

COLUMNS = (
    "transformers", "recipes", "group", "class", "outcome of the class", "tower or call", "found by", "outcome",
    "error", "why",
)  # fmt: skip
OUTSIDE = ("package", "version", "module", "encoder", "outcome", "error", "why")

TRIED = ("replayed", "replayed in part", "eager", "refused", "wrong")
"""Outcomes of classes that could be tried."""

REASONS = (
    ("replayed in part", "not called", "", "in part: no call known"),
    ("replayed in part", "refused", "reaches no tower", "in part: call reaches no tower"),
    ("replayed in part", "refused", "", "in part: one part refused"),
    ("replayed in part", "eager", "", "in part: one part eager"),
    ("eager", "eager", "attention_mask of clips", "eager: `attention_mask` of clips"),
    ("eager", "eager", "outputs are read", "eager: padded outputs are read"),
    ("eager", "eager", "patch_attention_mask", "eager: padded `patch_attention_mask`"),
    ("eager", "eager", "", "eager: `output_hidden_states=True`"),
    ("refused", "refused", "took more than", "refused: over 300 s"),
    ("refused", "refused", "", "refused: cannot be graphed"),
)
"""Why a class does not replay all calls, in a few words, by its outcome, the state of a row and a part of its reason.

The first that fits counts. The CSV has the reasons in full.
"""


def models(result: dict[str, Any]) -> Iterator[list[Row]]:
    """Yield the rows of each model."""
    for _, rows in groupby(result["rows"], key=lambda row: (row["group"], row["model"])):
        yield list(rows)


def totals(*results: dict[str, Any]) -> str:
    """Numbers of classes by outcome: a line for each result, and one for the best known encoders in the first."""
    known = {name for names in KNOWN.values() for name in names}
    lines = []
    for result in results:
        label = result["transformers"] if result.get("recipes", True) else f"{result['transformers']} without recipes"
        found = {rows[0]["model"]: outcome(rows) for rows in models(result)}
        lines.append(_counted(label, found.values()))
        if result is results[0]:
            best = [each for name, each in found.items() if name in known]
            lines.append(_counted(f"its {len(best)} best-known encoders", best))
    return table(("transformers", "classes", "replayed", "in part", *TRIED[2:], "not tried"), lines)


def _counted(label: str, found: Iterable[str]) -> tuple[str | int, ...]:
    counts = Counter(found)
    tried = [counts[each] for each in TRIED]
    return label, counts.total(), *tried, counts.total() - sum(tried)


def incomplete(result: dict[str, Any]) -> str:
    """The classes that were tried and do not replay all of their calls, by reason."""
    names: dict[str, list[str]] = {words: [] for *_, words in REASONS}
    for rows in models(result):
        if (each := outcome(rows)) in TRIED[1:]:
            names[_reason(each, rows)].append(f"`{rows[0]['model']}`")
    return table(("outcome", "classes"), [(words, ", ".join(own)) for words, own in names.items() if own])


def _reason(each: str, rows: Sequence[Row]) -> str:
    wanted = {own for one, own, _, _ in REASONS if one == each}
    row = next(row for row in rows if state(row) in wanted)
    return next(words for one, own, part, words in REASONS if (one, own) == (each, state(row)) and part in _why(row))


def outside(result: dict[str, Any]) -> str:
    """Modules of other packages that replay: packages of which all do, and others."""
    if wrong := [row["module"] for row in result["rows"] if row["outcome"] not in ("replayed", "eager")]:
        raise ValueError(f"{wrong} gave wrong outputs, for which the table has no place")
    replays = {row["package"]: list[bool]() for row in result["rows"]}
    for row in result["rows"]:
        replays[row["package"]].append(row["outcome"] == "replayed")
    complete = {package: own for package, own in replays.items() if all(own)}
    others = {package: own for package, own in replays.items() if not all(own)}
    some = ", ".join(f"{package} ({sum(own)} of {len(own)})" for package, own in others.items())
    return table(("replayed", "packages"), [(_share(complete), ", ".join(complete)), (_share(others), some)])


def _share(replays: dict[str, list[bool]]) -> str:
    own = sum(replays.values(), list[bool]())
    return f"{sum(own)} of {len(own)}"


def csv_files(results: Path) -> dict[str, str]:
    """The text of each CSV file, from the results in a folder."""
    names = (*RESULTS, "coverage_outside")
    read = {name: json.loads((results / f"{name}.json").read_text()) for name in names}
    return {
        "coverage.csv": csv_text(COLUMNS, (line for name in RESULTS for line in _lines(read[name]))),
        "coverage_outside.csv": csv_text(OUTSIDE, _lines_outside(read["coverage_outside"])),
    }


def _lines(result: dict[str, Any]) -> Iterator[Sequence[str]]:
    recipes = "yes" if result.get("recipes", True) else "no"
    for rows in models(result):
        for row in rows:
            found = ", ".join(dict.fromkeys((row["found"] or {}).values()))
            error = f"{row['error']:.0e}" if row["found"] else ""
            own = (row["modality"], found, state(row), error, _why(row))
            yield result["transformers"], recipes, row["group"], row["model"], outcome(rows), *own


def _why(row: Row) -> str:
    if state(row) == "no tower":
        return ""
    return " ".join((row["why"] if not row["found"] else "; ".join(row["eager"])).split())


def _lines_outside(result: dict[str, Any]) -> Iterator[Sequence[str]]:
    for row in result["rows"]:
        own = (row["module"], row["encoder"], row["outcome"], f"{row['error']:.0e}", row["why"])
        yield row["package"], result["versions"][row["package"]], *own
