"""The report of an encoder as one self-contained page: the table, and its figures drawn as SVG."""

import re
from collections.abc import Sequence
from html import escape

from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.costs import Costs
from varlen_graphs.stats import Stats

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 12, 46
"""The margins of a figure, pixels."""

LABELS = 24
"""At most so many bars are labelled."""

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML has no place for: control characters, such as those of colours in the text of an error."""

STYLE = """
:root { color-scheme: light dark; --ink: #2c3e50; --accent: #e67e22; --grid: #dde2e6; --ground: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #c8d3dc; --grid: #37424c; --ground: #171c21; } }
body { font: 14px system-ui, sans-serif; color: var(--ink); background: var(--ground); }
body { max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 18px; } h2 { font-size: 14px; margin: 2em 0 0; }
pre { font-size: 12px; overflow-x: auto; }
svg { width: 100%; height: auto; font-size: 11px; }
svg text { fill: var(--ink); } svg line { stroke: var(--grid); }
.bar0 { fill: var(--ink); } .bar1 { fill: var(--accent); }
polyline { fill: none; stroke: var(--accent); stroke-width: 2; } circle { fill: var(--accent); }
"""


def page(name: str, text: str, costs: Costs, stats: Stats) -> str:
    """The page, as HTML that is XML as well.

    Args:
        name: What to call the encoder.
        text: The table.
        costs: The budgets in use, if any, and what was measured of them.
        stats: The counters, of budgets that are gone too.
    """
    parts = [f"<h2>{escape(title)}</h2>\n{figure}" for title, figure in _figures(costs, stats).items()]
    name, text = (_NO_XML.sub("", each) for each in (name, text))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            f"<title>{escape(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(name)}</h1>",
            *parts,
            f"<h2>All of it</h2>\n<pre>{escape(text)}</pre>\n</body>\n</html>\n",
        ]
    )


def _figures(costs: Costs, stats: Stats) -> dict[str, str]:
    """The figures, by their titles: what budgets in use take, and what was replayed, in those that are gone too."""
    figures = {}
    in_use, used = sorted(costs.replays), [*stats.replays]  # at one moment
    if in_use:
        cost = "Milliseconds of a replay, attention aside," if costs.measured else "Assumed cost of a replay, in rows,"
        figures[f"{cost} by the rows of its budget"] = _line(in_use, [costs.replays[budget] for budget in in_use])
    if budgets := sorted({*in_use, *used}):
        replays = [stats.replays[budget] for budget in budgets]
        active = [stats.active[budget] for budget in budgets]
        padding = [budget.rows * count - rows for budget, count, rows in zip(budgets, replays, active, strict=True)]
        figures["Replays of each budget"] = _bars(budgets, {"replays": replays})
        figures["Rows replayed in each budget: active ones, and padding in orange"] = _bars(
            budgets, {"active rows": active, "rows of padding": padding}
        )
    if in_use and costs.bytes_per_row is not None:
        memory = [costs.bytes_per_row * budget.rows / 2**20 for budget in in_use]
        figures["MiB that pool and arena take up to each budget, in proportion to its rows"] = _line(in_use, memory)
    return figures


def _line(budgets: Sequence[Budget], values: Sequence[float]) -> str:
    """Values over the rows of budgets."""
    widest = budgets[-1].rows
    top = _ceiling(max(values))
    points = [(_x(budget.rows / widest), _y(value / top)) for budget, value in zip(budgets, values, strict=True)]
    marks = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{budget.rows} rows: {_number(value)}</title></circle>'
        for (x, y), budget, value in zip(points, budgets, values, strict=True)
    ]
    ticks = [
        f'<text x="{_x(share):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{share * widest:,.0f}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return _figure(top, [*ticks, f'<polyline points="{path}"/>', *marks])


def _bars(budgets: Sequence[Budget], stacks: dict[str, Sequence[int]]) -> str:
    """Numbers by budget, one kind on top of the other."""
    top = _ceiling(max(map(sum, zip(*stacks.values(), strict=True))))
    each = (WIDTH - LEFT - RIGHT) / len(budgets)
    parts = []
    for at, budget in enumerate(budgets):
        x, below = LEFT + at * each, 0
        for level, (kind, numbers) in enumerate(stacks.items()):
            upper, lower = _y((below + numbers[at]) / top), _y(below / top)
            parts.append(
                f'<rect class="bar{level}" x="{x + each * 0.1:.1f}" y="{upper:.1f}" width="{each * 0.8:.1f}" '
                f'height="{lower - upper:.1f}"><title>{budget.rows} rows: {numbers[at]:,} {kind}</title></rect>'
            )
            below += numbers[at]
        if at % -(-len(budgets) // LABELS) == 0:
            middle, bottom = x + each / 2, HEIGHT - BOTTOM + 10
            parts.append(
                f'<text x="{middle:.1f}" y="{bottom}" text-anchor="end" '
                f'transform="rotate(-45 {middle:.1f} {bottom})">{budget.rows}</text>'
            )
    return _figure(top, parts)


def _figure(top: float, parts: Sequence[str]) -> str:
    """A figure with lines at quarters of its height, of which `top` is the number."""
    lines = [
        f'<line x1="{LEFT}" y1="{_y(share):.1f}" x2="{WIDTH - RIGHT}" y2="{_y(share):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end">{_number(top * share)}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    body = "\n".join([*lines, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">\n{body}\n</svg>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ceiling(value: float) -> float:
    """The next round number: four lines at quarters of it have short numbers."""
    scale = 10 ** len(str(int(value)))
    return next((scale * part for part in (0.12, 0.2, 0.4, 0.6, 0.8) if scale * part >= value), float(scale))
