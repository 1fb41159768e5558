"""Score the doctor and default encoders over the corpus, print what is missing, and write the score.

`python -m tests.doctor.corpus --only RADIO IntInTry` prints the score of some towers or modules, and writes nothing.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import torch
import transformers

from benchmarks.common import table
from tests.doctor.corpus.everything import CASES, TOWERS
from tests.doctor.corpus.score import PRECISION, RECALL, Score, Tally, score

PAGE = Path("docs/doctor.md")
JSON = Path("docs/doctor-score.json")
PLACE = re.compile(r"(<!-- score -->\n)(.*?)(<!-- end -->)", re.DOTALL)
EXPECTATIONS = {"blocks": "named by the doctor", "proof": "refused by the check", "fine": "harmless"}


def as_dict(measured: Score) -> dict:
    """Return the score for JSON."""
    modules = {
        name: {"expects": measured.cases[name].expects, **own.as_dict(), **measured.outcomes[name].as_dict()}
        for name, own in measured.modules.items()
    }
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "towers": {name: own.as_dict() for name, own in measured.towers.items()},
        "modules": modules,
    }


def section(written: dict) -> str:
    """Return the tables of a score."""
    sums = [(label, [*written[key].values()]) for label, key in (("towers", "towers"), ("modules", "modules"))]
    named = [
        (
            f"{len(own)} {label}", sum(one["listed"] for one in own), sum(len(one["missed"]) for one in own),
            sum(one["named"] for one in own), sum(len(one["invented"]) for one in own),
            *(f"{100 * share:.1f} %" for share in (_sum(own).recall, _sum(own).precision)),
        )
        for label, own in sums
    ]  # fmt: skip
    head = ("", "listed", "missed", "statements named", "invented", "recall", "precision")
    modules = [*written["modules"].values()]
    outcomes = []
    for expectation, label in EXPECTATIONS.items():
        own = [one for one in modules if one["expects"] == expectation]
        counts = [sum(one["outcome"] == outcome for one in own) for outcome in ("right", "refused", "wrong")]
        outcomes.append((label, len(own), *counts))
    after = ("expected", "modules", "replayed, right", "refused, or eager with a reason", "silently wrong")
    versions = f"torch {written['torch']}, transformers {written['transformers']}"
    return f"{versions}:\n\n{table(head, named)}\n\n{table(after, outcomes)}"


def _sum(own: list[dict]) -> Tally:
    return sum((Tally(one["listed"], one["missed"], one["named"], one["invented"]) for one in own), Tally())


def describe(measured: Score) -> str:
    """Return what is missing, line by line."""
    lines = []
    for total in (measured.of_towers, measured.of_modules):
        lines += [f"missed: {one}" for one in total.missed] + [f"invented: {one}" for one in total.invented]
    lines += [f"silently wrong: {name}, items of {measured.outcomes[name].wrong}" for name in measured.silently_wrong]
    lines += [f"harmless, but not replayed: {name}: {measured.outcomes[name].said}" for name in measured.refused_twins]
    return "\n".join(lines)


def filled(page: str, written: dict) -> str:
    """Return the page with the tables of a score."""
    return PLACE.sub(lambda match: f"{match[1]}\n{section(written)}\n\n{match[3]}", page)


def main() -> int:
    """Score, print and write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of towers or modules; print, and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    only = set(options.only or [*TOWERS, *CASES])
    measured = score(
        {name: own for name, own in TOWERS.items() if name in only},
        {name: own for name, own in CASES.items() if name in only},
    )
    written = as_dict(measured)
    print(describe(measured), section(written), sep="\n\n")
    if options.only is None:
        JSON.write_text(json.dumps(written, indent=1) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), written))
    totals = (measured.of_towers, measured.of_modules)
    reached = all(total.recall >= RECALL and total.precision >= PRECISION for total in totals)
    return 0 if reached and not measured.silently_wrong and not measured.refused_twins else 1


if __name__ == "__main__":
    sys.exit(main())
