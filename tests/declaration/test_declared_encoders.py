"""Every encoder in the table of docs/declarations.md, declared as it says, compared with the module itself."""

from pathlib import Path

import pytest

from tests.support.declared import DECLARED
from tests.support.declared.case import check


@pytest.mark.parametrize("kind", DECLARED)
def test_what_the_page_says_can_be_declared_can_be(kind):
    check(DECLARED[kind]("cpu"), 1e-5)


def test_each_line_of_the_page_has_a_case():
    page = (Path(__file__).parent.parent.parent / "docs" / "declarations.md").read_text()
    kinds = [line.split(" | ")[0][2:] for line in page.splitlines() if line.startswith("| ")]
    assert sorted(kind for kind in kinds if kind not in ("your encoder has", "---")) == sorted(DECLARED)
