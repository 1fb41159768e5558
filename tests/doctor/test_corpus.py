"""The doctor against sites that were listed by reading, and default encoders of modules made to mislead them.

`make score` measures the same, prints what is missing, and writes the page.
"""

import json
from pathlib import Path

import pytest
import transformers

from tests.doctor.corpus.__main__ import JSON, PAGE, filled
from tests.doctor.corpus.everything import CASES, MODULES, TOWERS
from tests.doctor.corpus.score import PRECISION, RECALL, Tally, run_case, score_case, score_tower
from tests.doctor.corpus.sites import MARK, marked

if transformers.__version__.split(".")[:2] != ["5", "23"]:
    pytest.skip("the sites are those of transformers 5.23", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent


def check(tallies):
    total = sum(tallies, Tally())
    assert total.listed
    assert total.recall >= RECALL, "\n".join(total.missed)
    assert total.precision >= PRECISION, "\n".join(total.invented)


def test_the_corpus_is_large_and_its_modules_are_marked():
    assert len(TOWERS) >= 40
    assert sum(case.expects != "fine" for case in CASES.values()) >= 80
    for case in CASES.values():
        assert bool(marked(case.made, MARK)) == (case.expects == "blocks")


def test_sites_of_towers_are_named_and_few_others():
    """Of every twelfth tower; `make score` counts those of all."""
    check(score_tower(name, TOWERS[name]) for name in [*TOWERS][::12])


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_sites_of_modules_are_named_and_few_others(file):
    """Where the proof has to refuse a module, no line is asked for: of every fourth; `make score` counts those of all."""
    own = [case for case in CASES.values() if case.made.__module__ == file.__name__]
    asked = [case for case in own if case.expects != "proof"]
    tallies = [score_case(case) for case in asked + [case for case in own if case.expects == "proof"][::4]]
    if any(case.expects == "blocks" for case in own):
        check(tallies)
    else:
        assert not [one for tally in tallies for one in tally.invented]


@pytest.mark.parametrize("name", CASES)
def test_no_module_is_silently_wrong_by_default_and_harmless_ones_are_replayed(name):
    outcome = run_case(CASES[name])
    assert not outcome.wrong
    if CASES[name].expects == "fine" and not CASES[name].eager:
        assert outcome.replayed, outcome.said


def test_the_page_has_the_score_of_everything():
    written = json.loads((ROOT / JSON).read_text())
    assert (set(written["towers"]), set(written["modules"])) == (set(TOWERS), set(CASES))
    page = (ROOT / PAGE).read_text()
    assert filled(page, written) == page
