"""`GraphedEncoder.report` as a page: what it draws, and that it stands by itself."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder
from varlen_graphs.calls import html
from varlen_graphs.stats import Stats

SVG = "{http://www.w3.org/2000/svg}"


def page(name, text, costs, stats):
    """The page of one encoder."""
    return html.page(name, [html.Section("", text, costs, stats)])


def parsed(text):
    """The page as a tree; an error if it is not well-formed."""
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def titles(figure):
    return [title.text for title in figure.iter(f"{SVG}title")]


def test_a_report_is_written_as_a_page(tmp_path):
    encoder = attention_encoder()
    for lengths in ([20], [30, 30], [100]):
        encoder(torch.randn(sum(lengths), 8), lengths=lengths)
    text = encoder.report(tmp_path / "report.html")
    tree = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert text == encoder.report() == tree.find(".//pre").text
    assert tree.find(".//h1").text == repr(encoder)
    cost, replays, rows = tree.iter(f"{SVG}svg")
    assert titles(cost) == ["64 rows: 576", "128 rows: 640"]
    assert titles(replays) == ["64 rows: 2 replays", "128 rows: 1 replays"]
    assert titles(rows) == [
        "64 rows: 80 active rows", "64 rows: 48 padding rows",
        "128 rows: 100 active rows", "128 rows: 28 padding rows",
    ]  # fmt: skip


def test_axes_have_titles_and_counts_whole_numbers(tmp_path):
    encoder = attention_encoder()
    encoder(torch.randn(20, 8), lengths=[20])
    encoder.report(tmp_path / "report.html")
    _, replays, _ = parsed((tmp_path / "report.html").read_text(encoding="utf-8")).iter(f"{SVG}svg")
    texts = [text.text for text in replays.iter(f"{SVG}text")]
    assert texts[:5] == ["0", "1", "2", "3", "4"]
    assert texts[-2:] == ["rows of the budget", "replays"]


def test_eager_runs_are_drawn_by_reason_the_most_frequent_first():
    stats = Stats()
    for reason in ("forward hooks", "larger than every budget", "<odd> & \x1b", "larger than every budget"):
        stats.count_eager(reason)
    *_, figure = parsed(page("Encoder", "text", vg.routing.Costs({}), stats)).iter(f"{SVG}svg")
    assert titles(figure) == ["larger than every budget: 2", "forward hooks: 1", "<odd> & : 1"]
    most, *others = (float(bar.get("width")) for bar in figure.iter(f"{SVG}rect"))
    assert others == pytest.approx([most / 2] * 2, abs=0.1)


def test_a_page_loads_nothing_from_elsewhere():
    costs = vg.routing.Costs({vg.budgets.Budget(64): 1.0, vg.budgets.Budget(128): 2.0}, host=9.0, bytes_per_row=2.0**14)
    made = page("Encoder", "text", costs, Stats())
    assert not re.search(r"<(script|link|img|iframe)|src=|href=|url\(|@import", made)
    assert [*re.findall(r"https?://[^\"]*", made)] == ["http://www.w3.org/2000/svg"] * 4
    assert titles([*parsed(made).iter(f"{SVG}svg")][-1]) == ["64 rows: 1", "128 rows: 2"]  # MiB


def test_what_a_module_is_called_is_no_markup():
    costs = vg.routing.Costs.in_rows([vg.budgets.Budget(64)])
    tree = parsed(page("<b>&", "<pre>&", costs, Stats()))
    assert (tree.find(".//h1").text, tree.find(".//pre").text) == ("<b>&", "<pre>&")


@given(st.text(st.characters()))
def test_any_text_makes_a_page_that_is_well_formed(text):
    made = page(
        "Encoder", f"RuntimeError: \x1b[31mred\x1b[0m{text}", vg.routing.Costs.in_rows([vg.budgets.Budget(64)]), Stats()
    )
    made.encode()
    assert parsed(made).find(".//pre").text.startswith("RuntimeError: [31mred[0m")


def test_replays_of_budgets_that_are_gone_are_told(tmp_path):
    encoder = attention_encoder()
    for lengths in ([20], [100]):
        encoder(torch.randn(sum(lengths), 8), lengths=lengths)
    encoder.drop_budget(encoder.budgets[0])
    text = encoder.report(tmp_path / "report.html")
    assert re.search(r"^ +64 .* 1  dropped$", text, re.MULTILINE)
    _, replays, _ = parsed((tmp_path / "report.html").read_text(encoding="utf-8")).iter(f"{SVG}svg")
    assert titles(replays) == ["64 rows: 1 replays", "128 rows: 1 replays"]
    nothing_in_use = [*parsed(page("Encoder", text, vg.routing.Costs({}), encoder.stats)).iter(f"{SVG}svg")]
    assert titles(nothing_in_use[0]) == titles(replays)


budgets = st.integers(1, 30_000).map(vg.budgets.Budget)


@given(st.dictionaries(budgets, st.floats(1e-3, 1e5), min_size=1, max_size=100), st.data())
def test_whatever_was_counted_lies_inside_its_figure(replays, data):
    stats = Stats()
    for budget in data.draw(st.lists(st.sampled_from(sorted(replays)), max_size=20)):
        stats.count_replay(budget, data.draw(st.integers(1, budget.rows)))
    known = data.draw(st.sampled_from([None, 1.0, 1e6]))
    figures = [
        *parsed(page("x", "y", vg.routing.Costs(replays, host=1.0, bytes_per_row=known), stats)).iter(f"{SVG}svg")
    ]
    assert len(figures) == (3 if known is None else 4)
    for figure in figures:
        _, _, width, height = map(int, figure.get("viewBox").split())
        for bar in figure.iter(f"{SVG}rect"):
            x, y, wide, high = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width
            assert 0 <= y <= y + high <= height
        for point in figure.iter(f"{SVG}circle"):
            assert 0 <= float(point.get("cx")) <= width
            assert 0 <= float(point.get("cy")) <= height


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_draws_the_page(tmp_path):
    """What it draws differs from an empty page, and it takes the page as it is."""
    costs = vg.routing.Costs(
        {budget: 1 + budget.rows / 1000 for budget in vg.Ladder()}, host=9.0, bytes_per_row=2.0**14
    )
    (tmp_path / "report.html").write_text(page("Encoder", "text", costs, Stats()), encoding="utf-8")
    (tmp_path / "empty.html").write_text("<!DOCTYPE html>")
    run = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    for name in ("report", "empty"):
        file = f"file://{tmp_path}/{name}.html"
        subprocess.run(
            [*run, f"--screenshot={tmp_path}/{name}.png", file], check=True, capture_output=True, timeout=120
        )
    shown = subprocess.run(
        [*run, "--dump-dom", file.replace("empty", "report")], capture_output=True, text=True, timeout=120
    )
    assert shown.stdout.count("<svg") == 4
    assert shown.stdout.count("<circle") == 2 * len([*vg.Ladder()])
    assert (tmp_path / "report.png").stat().st_size > 4 * (tmp_path / "empty.png").stat().st_size
