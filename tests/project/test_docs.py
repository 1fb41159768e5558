"""Every Python snippet of the README and the docs runs."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import varlen_graphs as vg
from benchmarks.page import PAGES as BENCHMARK_PAGES
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


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub and MkDocs name them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", SNIPPET.sub("", page.read_text())):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(there), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["footguns", "deployment"])
def test_every_fact_is_backed_by_a_test_that_there_is(page):
    _, *facts = (ROOT / "docs" / f"{page}.md").read_text().split("\n\n**")
    for fact in facts:
        tests = re.findall(r"(tests/[\w/]+\.py):\s(test_\w+)", fact)
        assert tests or "not run" in fact, fact
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("path", BENCHMARK_PAGES, ids=lambda path: path.name)
def test_the_tables_of_the_benchmark_pages_are_those_of_the_results(path):
    page = (ROOT / path).read_text()
    assert 0 < page.count("<!-- table:") == page.count("<!-- end -->") == len(PLACE.findall(page))
    assert filled(page, ROOT / "docs" / "benchmarks") == page


def test_every_result_is_on_one_of_the_benchmark_pages():
    text = "".join((ROOT / page).read_text() for page in BENCHMARK_PAGES)
    shown = {result for _, _, result, _, _ in PLACE.findall(text)}
    assert {path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.json")} - shown == {"demo"}


def test_the_encoder_that_pages_import_is_the_one_that_getting_started_shows():
    source = (ROOT / "examples" / "encoder.py").read_text()
    shown = source[source.index("class Encoder") : source.index("\n\n\nif __name__")]
    assert shown in (ROOT / "docs" / "getting-started.md").read_text()


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    packages = [member for name in vg.__all__ if isinstance(member := getattr(vg, name), ModuleType)]
    assert packages
    for package in packages:
        missing = [name for name in package.__all__ if not re.search(rf"\b{name}\b", page)]
        assert not missing, package.__name__
