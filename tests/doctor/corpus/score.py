"""Score of the doctor over the corpus, and of default encoders over its modules."""

import atexit
import gc
import inspect
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import varlen_graphs as vg
from tests.doctor.corpus.cases import Case
from tests.doctor.corpus.sites import CONSEQUENCE, MARK, Place, marked, place_of
from tests.doctor.corpus.vision import Tower
from tests.support.segments import relative
from varlen_graphs.doctor import Diagnosis

LAYOUTS = [[12, 8], [5, 15], [7, 7, 6], [20], [5, 4, 8, 3], [9, 3], [21, 12]]
"""Items of the calls shown to the doctor; most have equally many rows."""

CALLS = [[12, 8], [5, 15], [7, 7, 6], [3], [30], [20, 10, 11], [1, 2, 3, 4], [40, 30, 20], [12, 8], [16, 16]]
"""Items of the calls to an encoder. One is split over two replays."""

BUDGETS = (vg.budgets.Budget(32, items=4), vg.budgets.Budget(64, items=8))

TOLERANCE = 1e-4

RECALL, PRECISION = 0.99, 0.98
"""The targets."""


@dataclass
class Tally:
    """Sites that were listed, and places that were named.

    Attributes:
        listed: Number of listed sites; modules count once.
        missed: Sites that were not named.
        named: Number of named statements, of towers without consequences of sites.
        invented: Statements that were named and are not listed.
    """

    listed: int = 0
    missed: list[str] = field(default_factory=list)
    named: int = 0
    invented: list[str] = field(default_factory=list)

    @property
    def recall(self) -> float:
        """Share of the listed sites that were named."""
        return 1 - len(self.missed) / max(1, self.listed)

    @property
    def precision(self) -> float:
        """Share of the named statements that are listed."""
        return 1 - len(self.invented) / max(1, self.named)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.listed + other.listed, self.missed + other.missed, self.named + other.named,
            self.invented + other.invented,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return dict(vars(self))


def tally(name: str, diagnosis: Diagnosis, listed: Sequence[Place], allowed: Sequence[Place]) -> Tally:
    """Compare blocking findings with listed sites."""
    lines = {(own.line.file, own.line.number): own for own in diagnosis if own.blocks}
    places = list(dict.fromkeys(listed))
    missed = [place for place in places if not any(place.holds(*line) for line in lines)]
    kept = {line: own for line, own in lines.items() if not any(place.holds(*line) for place in allowed)}
    kept |= {line: own for line, own in lines.items() if any(place.holds(*line) for place in places)}
    invented = [own for line, own in kept.items() if not any(place.holds(*line) for place in places)]
    return Tally(
        len(places),
        [f"{name}: {_source(place)}" for place in missed],
        len(kept),
        [f"{name}: {own.kind}: {own.line.source or own.line}" for own in invented],
    )


def score_tower(name: str, tower: Tower) -> Tally:
    """Diagnose a tower."""
    _seed()
    module, calls = tower.make()
    home = type(module).__module__
    listed, allowed = ([place_of(site, home) for site in own] for own in (tower.sites, tower.consequences))
    return tally(name, _diagnose(module, calls), listed, allowed)


def score_case(case: Case) -> Tally:
    """Diagnose a module. It counts once, and is named by a finding on one of its sites or of what follows from them.

    What the doctor says of a module that the proof has to refuse is neither asked for nor wrong.
    """
    _seed()
    calls = [case.arguments(lengths, at, bound=64) for at, lengths in enumerate(LAYOUTS)]
    fixed = case.static_args(0)
    diagnosis = _diagnose(case.module(), [call | fixed for call in calls])
    listed, allowed = marked(case.made, MARK), marked(case.made, CONSEQUENCE)
    if case.expects == "proof":
        allowed = [Place(inspect.getfile(case.made), 1, sys.maxsize)]
    name, counted = case.made.__name__, tally(case.made.__name__, diagnosis, [*listed, *allowed], ())
    asked = case.expects == "blocks"
    missed = [f"{name}: {_source(listed[0])}"] if asked and not counted.named - len(counted.invented) else []
    return Tally(int(asked), missed, counted.named, counted.invented)


@dataclass
class Outcome:
    """What a default encoder does with a module.

    Attributes:
        wrong: Layouts of calls whose output was wrong, without an error or a reason.
        said: What it said, if it refused the module or ran it eager.
        replayed: True if all calls were replayed.
        raw: True if the error was not one of the library's own.
    """

    wrong: list[list[int]] = field(default_factory=list)
    said: str = ""
    replayed: bool = True
    raw: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome in a word, and what was said, for JSON."""
        outcome = "wrong" if self.wrong else "right" if self.replayed else "refused"
        return {"outcome": outcome, "said": self.said.split("\n")[0], "raw": self.raw}


def run_case(case: Case) -> Outcome:
    """Call a default encoder of a module, and compare each call with the module on the exact layout."""
    _seed()
    outcome, reference = Outcome(), case.module()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            encoder = vg.GraphedEncoder(case.module(), BUDGETS, case.spec, backend="tape")
            for at, lengths in enumerate(CALLS):
                _run_call(case, encoder, reference, lengths, at, outcome)
        except Exception as error:
            outcome.said, outcome.replayed = f"{type(error).__name__}: {error}", False
            outcome.raw = not isinstance(error, vg.errors.VarlenGraphsError)
    return outcome


def _run_call(
    case: Case, encoder: vg.GraphedEncoder, reference: nn.Module, lengths: list[int], at: int, outcome: Outcome
) -> None:
    arguments = case.arguments(lengths, at)
    case.before(encoder.module, at)
    case.before(reference, at)
    before = encoder.stats.eager.copy()
    given = {"x": arguments["x"].clone(), "lengths": torch.tensor(lengths), **case.static_args(at)}
    output = encoder(**given)
    expected = reference(**arguments)
    if reasons := encoder.stats.eager - before:
        outcome.said, outcome.replayed = "; ".join(reasons), False
    elif relative(output, expected) > TOLERANCE:
        outcome.wrong.append(lengths)


@dataclass
class Score:
    """Everything that is measured."""

    towers: dict[str, Tally]
    modules: dict[str, Tally]
    outcomes: dict[str, Outcome]
    cases: Mapping[str, Case]

    @property
    def of_towers(self) -> Tally:
        """The sum over all towers."""
        return sum(self.towers.values(), Tally())

    @property
    def of_modules(self) -> Tally:
        """The sum over all modules."""
        return sum(self.modules.values(), Tally())

    @property
    def silently_wrong(self) -> list[str]:
        """Modules with a wrong output and no word about it."""
        return [name for name, outcome in self.outcomes.items() if outcome.wrong]

    @property
    def refused_twins(self) -> list[str]:
        """Harmless modules that were not replayed."""
        harmless = (name for name, case in self.cases.items() if case.expects == "fine" and not case.eager)
        return [name for name in harmless if not self.outcomes[name].replayed]


def score(towers: Mapping[str, Tower], cases: Mapping[str, Case]) -> Score:
    """Score towers and modules."""
    return Score(
        {name: score_tower(name, tower) for name, tower in towers.items()},
        {name: score_case(case) for name, case in cases.items()},
        {name: run_case(case) for name, case in cases.items()},
        cases,
    )


atexit.register(gc.unfreeze)  # so that what is frozen is torn down with all else


def _diagnose(module: nn.Module, calls: Sequence[dict[str, Any]]) -> Diagnosis:
    gc.freeze()  # the doctor collects after runs that keep memory; all of transformers need not be searched each time
    return vg.diagnose(module, *calls)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _source(place: Place) -> str:
    lines = Path(place.file).read_text(encoding="utf-8").splitlines()[place.first - 1 : place.last]
    return " ".join(line.strip() for line in lines)[:120]
