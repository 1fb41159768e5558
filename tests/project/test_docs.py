"""Every Python snippet of the README and the docs runs."""

import re
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest
import torch

import varlen_graphs as vg
from benchmarks.coverage import page as coverage
from benchmarks.page import PAGES as BENCHMARK_PAGES
from benchmarks.page import PLACE, filled
from varlen_graphs.capture.pool import others_capture

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SNIPPET.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_snippets_of_a_page_run_one_after_the_other(page):
    namespace = {"__name__": "page"}
    deadline = time.monotonic() + 60
    while others_capture() and time.monotonic() < deadline:  # what another page left in the background: calls run eager
        time.sleep(0.01)
    try:
        for snippet in SNIPPET.finditer(page.read_text()):
            line = page.read_text()[: snippet.start()].count("\n") + 1
            with warnings.catch_warnings(), torch.enable_grad():  # as for a reader who pastes them
                warnings.filterwarnings("error", category=UserWarning, module=r"page|varlen_graphs\.")
                exec(compile("\n" * line + snippet[1], str(page), "exec"), namespace)
    finally:
        for future in [one for one in namespace.values() if isinstance(one, Future)]:
            future.cancel()


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
            assert there.exists(), f"{page.relative_to(ROOT)}: {target}"
            assert not anchor or anchor in anchors_of(there), f"{page.relative_to(ROOT)}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["footguns", "operate"])
def test_every_fact_is_backed_by_a_test_that_there_is(page):
    _, *facts = (ROOT / "docs" / f"{page}.md").read_text().split("\n\n**")
    assert facts
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


def test_the_csv_files_are_those_of_the_results():
    files = coverage.csv_files(ROOT / "docs" / "benchmarks")
    assert {*files} == {path.name for path in (ROOT / "docs").glob("coverage*.csv")}
    for name, text in files.items():
        assert (ROOT / "docs" / name).read_text() == text


def test_the_table_of_results_has_every_json_file():
    folder = ROOT / "docs" / "benchmarks"
    listed = re.findall(r"^\| `([\w.]+)` \|", (folder / "files.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in folder.glob("*.json"))


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
