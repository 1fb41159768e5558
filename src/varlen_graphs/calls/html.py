"""The report of an encoder as a self-contained HTML page: the table, and figures as SVG."""

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.routing.costs import Costs
from varlen_graphs.stats import Stats

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 12, 58
"""Margins of a figure, in pixels."""

REASON = 40
"""Pixels of a reason with its bar."""

LABELS = 24
"""Largest number of labelled bars."""

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids: control characters, such as those of colours in the text of an error."""

STYLE = """
:root { color-scheme: light dark; --ink: #2c3e50; --accent: #e67e22; --grid: #dde2e6; --ground: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #c8d3dc; --grid: #37424c; --ground: #171c21; } }
body { font: 14px system-ui, sans-serif; color: var(--ink); background: var(--ground); }
body { max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 18px; } h2 { font-size: 14px; margin: 2em 0 0; }
pre { font-size: 12px; white-space: pre-wrap; }
svg { width: 100%; height: auto; font-size: 11px; }
svg text { fill: var(--ink); } svg line { stroke: var(--grid); }
.bar0 { fill: var(--ink); } .bar1 { fill: var(--accent); }
polyline { fill: none; stroke: var(--accent); stroke-width: 2; } circle { fill: var(--accent); }
"""


class Section(NamedTuple):
    """An encoder on the page.

    Attributes:
        title: Its name among others.
        text: Its report.
        costs: Costs of the enabled budgets, if any.
        stats: Counters, dropped budgets included.
    """

    title: str
    text: str
    costs: Costs
    stats: Stats


def page(name: str, sections: Sequence[Section], text: str = "") -> str:
    """Return the page, as HTML that is also well-formed XML.

    Args:
        name: Name of the encoder, or of the model.
        sections: The encoders.
        text: What is said ahead of them.
    """
    parts = [f"<pre>{_escaped(text)}</pre>"] if text else []
    for one in sections:
        parts += [f"<h1>{_escaped(one.title)}</h1>"] if one.title else []
        parts += [f"<h2>{escape(title)}</h2>\n{figure}" for title, figure in _figures(one.costs, one.stats).items()]
        parts.append(f"<h2>Report</h2>\n<pre>{_escaped(one.text)}</pre>")
    head = f"<title>{_escaped(name)}</title>\n<style>{STYLE}</style>"
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n{head}\n</head>',
            f"<body>\n<h1>{_escaped(name)}</h1>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def _escaped(text: str) -> str:
    return escape(_NO_XML.sub("", text))


def _figures(costs: Costs, stats: Stats) -> dict[str, str]:
    """Draw the costs of enabled budgets, and the replays of all budgets; return the figures by title."""
    figures = {}
    enabled, used = sorted(costs.replays), [*stats.replays]  # copied: other threads change them
    if enabled:
        title, unit = "Assumed cost of a replay", "rows"
        if costs.measured:
            title, unit = "Time of a replay, without attention", "ms"
        figures[title] = _line(enabled, [costs.replays[budget] for budget in enabled], unit)
    if budgets := sorted({*enabled, *used}):
        replays = [stats.replays[budget] for budget in budgets]
        active = [stats.active[budget] for budget in budgets]
        padding = [budget.rows * count - rows for budget, count, rows in zip(budgets, replays, active, strict=True)]
        figures["Replays of each budget"] = _bars(budgets, {"replays": replays}, "replays")
        figures["Replayed rows of each budget: active rows, and padding in orange"] = _bars(
            budgets, {"active rows": active, "padding rows": padding}, "rows"
        )
    if eager := {**stats.eager}:
        figures["Eager runs by reason"] = _reasons(eager)
    if enabled and costs.bytes_per_row is not None:
        memory = [costs.bytes_per_row * budget.rows / 2**20 for budget in enabled]
        figures["MiB of pool and arena up to each budget, in proportion to its rows"] = _line(enabled, memory, "MiB")
    return figures


def _line(budgets: Sequence[Budget], values: Sequence[float], unit: str) -> str:
    """Draw values in a unit over the rows of budgets."""
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
    return _figure(top, [*ticks, f'<polyline points="{path}"/>', *marks], unit)


def _bars(budgets: Sequence[Budget], stacks: dict[str, Sequence[int]], unit: str) -> str:
    """Draw stacked bars of counts, one per budget."""
    most = max(map(sum, zip(*stacks.values(), strict=True)))
    top = _ceiling(most) if most > 8 else -(-max(most, 1) // 4) * 4.0  # quarters are whole numbers
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
    return _figure(top, parts, unit)


def _reasons(counts: dict[str, int]) -> str:
    """Draw a bar for each reason, below its text, the most frequent first."""
    most, parts = max(counts.values()), []
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    for at, (reason, count) in enumerate(ordered):
        y, wide = at * REASON, count / most * (WIDTH - 2 * LEFT)
        parts.append(
            f'<text x="0" y="{y + 12}">{_escaped(reason)}</text><rect class="bar1" x="0" y="{y + 17}" '
            f'width="{wide:.1f}" height="14"><title>{_escaped(reason)}: {count:,}</title></rect>'
            f'<text x="{wide + 6:.1f}" y="{y + 28}">{count:,}</text>'
        )
    return _svg(REASON * len(ordered), parts)


def _figure(top: float, parts: Sequence[str], unit: str) -> str:
    """Draw a figure over budgets with grid lines at quarters of its height; `top` is the value at the top."""
    lines = [
        f'<line x1="{LEFT}" y1="{_y(share):.1f}" x2="{WIDTH - RIGHT}" y2="{_y(share):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end">{_number(top * share)}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    middle = (HEIGHT + TOP - BOTTOM) / 2
    titles = [
        f'<text x="{_x(0.5):.1f}" y="{HEIGHT - 4}" text-anchor="middle">rows of the budget</text>',
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{unit}</text>',
    ]
    return _svg(HEIGHT, [*lines, *parts, *titles])


def _svg(height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n{body}\n</svg>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ceiling(value: float) -> float:
    """Return the next round number whose quarters have short labels."""
    scale = 10 ** len(str(int(value)))
    return next((scale * part for part in (0.12, 0.2, 0.4, 0.6, 0.8) if scale * part >= value), float(scale))
