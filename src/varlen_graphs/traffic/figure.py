"""Compare a plan with the usual ladders, as a figure. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from varlen_graphs.traffic.planning import Plan

ACTIVE, PADDING = "#2c3e50", "#e67e22"
DPI = 160


def draw(plans: Mapping[str, Plan], path: Path) -> None:
    """Draw padding, cost and memory of all plans, and the replayed rows of the first plan by budget."""
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 3), squeeze=False).flat
    first = next(iter(plans.values()))
    panels = {
        "padding, %": [100 * plan.padding_share for plan in plans.values()],
        f"{'ms' if first.measured else 'cost'} per call": [plan.cost_per_call for plan in plans.values()],
    }
    if first.memory is not None:
        panels["GiB"] = [(plan.memory or 0) / 2**30 for plan in plans.values()]
    for axes, (title, values) in zip(above.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.bar_label(axes.barh([*plans], values, color=PADDING), fmt="{:,.4g}", fontsize=7, padding=2)
        axes.set_xlabel(title, fontsize=8)
        axes.margins(x=0.25)
    axes.invert_yaxis()  # all panels share it
    axes = below.subplots()
    names = [str(budget.rows) for budget in first]
    active = [first.active[budget] for budget in first]
    padding = [budget.rows * first.replays[budget] - first.active[budget] for budget in first]
    axes.bar(names, active, color=ACTIVE, label="active rows")
    axes.bar(names, padding, bottom=active, color=PADDING, label="padding")
    axes.set_xlabel("budgets of the plan, rows", fontsize=8)
    axes.set_ylabel("rows replayed", fontsize=8)
    axes.tick_params(axis="x", rotation=90)
    axes.legend(fontsize=7, frameon=False)
    for axes in figure.axes:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)
