"""Every Python snippet of the README and the docs runs."""

import re
from pathlib import Path

import pytest

from benchmarks.page import PLACE, filled

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if SNIPPET.search(page.read_text())], ids=lambda p: p.name)
def test_the_snippets_of_a_page_run_one_after_the_other(page):
    namespace = {}
    for snippet in SNIPPET.finditer(page.read_text()):
        line = page.read_text()[: snippet.start()].count("\n") + 1
        exec(compile("\n" * line + snippet[1], str(page), "exec"), namespace)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", SNIPPET.sub("", page.read_text())):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_footgun_is_backed_by_a_test_that_there_is():
    _, *footguns = (ROOT / "docs" / "footguns.md").read_text().split("\n\n**")
    for footgun in footguns:
        tests = re.findall(r"(tests/[\w/]+\.py):\s(test_\w+)", footgun)
        assert tests, footgun
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text()


def test_the_tables_of_the_benchmarks_page_are_those_of_the_results():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.count("<!-- table:") == page.count("<!-- end -->") == len(PLACE.findall(page))
    assert filled(page, ROOT / "docs" / "benchmarks") == page
