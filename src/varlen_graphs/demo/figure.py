"""The figure of the demo: bars for each call. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

EAGER, GRAPHED = "#b0b6bf", "#e67e22"
DPI = 160

LEAST = 1e-9
"""Error at which the axis of errors begins."""


def draw_times(path: Path, title: str, calls: Mapping[str, tuple[float, float]]) -> None:
    """Draw the milliseconds of each call, eager and graphed."""
    figure, axes = _bars(title, [*calls])
    eager, graphed = zip(*calls.values(), strict=True)
    beside = axes.barh([at - 0.2 for at in range(len(calls))], eager, 0.4, color=EAGER, label="eager")
    own = axes.barh([at + 0.2 for at in range(len(calls))], graphed, 0.4, color=GRAPHED, label="graphed")
    axes.bar_label(beside, fmt="{:.2f}", padding=2)
    axes.bar_label(own, [f"{ms:.2f}, {other / ms:.1f} times as fast" for other, ms in calls.values()], padding=2)
    axes.set_xlabel("ms a call")
    axes.margins(x=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DPI)


def draw_errors(path: Path, title: str, calls: Mapping[str, float], allowed: float) -> None:
    """Draw the relative error of each call beside what is allowed."""
    figure, axes = _bars(title, [*calls])
    axes.set_xscale("log")
    axes.set_xlim(LEAST, 10 * allowed)
    axes.bar_label(axes.barh(range(len(calls)), [*calls.values()], 0.5, color=GRAPHED), fmt="{:.1e}", padding=2)
    axes.axvline(allowed, color=EAGER, label="allowed")
    axes.set_xlabel("relative error of graphed outputs")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DPI)


def _bars(title: str, names: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a figure with a row for each name, the first at the top."""
    figure = Figure(figsize=(7.2, 1.2 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
