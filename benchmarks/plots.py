"""Figure of what `benchmarks.qwen3_vl` wrote as JSON: latency against rows.

Run with `make plots`. Needs matplotlib: `pip install -e ".[bench]"`.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.traces import SINGLES, rows_of

STYLES = {
    "ours_compile": ("varlen_graphs, compile=True", "#c0392b", "-"),
    "ours": ("varlen_graphs", "#e67e22", "-"),
    "eager_varlen": ("eager, FlashAttention 2", "#2c3e50", "-"),
    "eager_sdpa": ("eager, sdpa", "#7f8c8d", "-"),
    "compile_dynamic": ("torch.compile, dynamic", "#2980b9", "-"),
    "compile_reduce_overhead": ("torch.compile, reduce-overhead, warm", "#27ae60", "-"),
    "oracle_blocks": ("oracle: exact graph of the tower", "#2c3e50", ":"),
    "oracle_core": ("oracle: exact graph of our forward", "#e67e22", ":"),
}
"""Label, colour and line of each system."""

SQUARES = (196, 784, 1764, 3136, 7056)
"""Rows of the single images: where the axis of rows is labelled."""

DPI = 160


def main() -> None:
    """Draw the figure of each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of benchmarks.qwen3_vl")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="a folder (docs/benchmarks)")
    options = parser.parse_args()
    plt.rcParams.update({"font.size": 8})
    for path in options.results:
        result = json.loads(path.read_text())
        figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
        draw_latency(axes, result)
        axes.set_title(f"Qwen3-VL {result['tower'].upper()} tower, {result['device']}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        target = options.out / f"{path.stem}_latency.png"
        figure.savefig(target, dpi=DPI)
        plt.close(figure)
        print(target)


def draw_latency(axes: Axes, result: dict[str, Any]) -> None:
    """Wall of a call against its rows: lines through the single images, dots for the calls of mix1 and mix4."""
    for system, (label, colour, style) in STYLES.items():
        rows = {row["input"]: row for row in result["rows"] if row["system"] == system and "failed" not in row}
        images = [name for name in rows if name in SINGLES and len(SINGLES[name]) == SINGLES[name][0][0] == 1]
        points = sorted((rows_of(SINGLES[name]), statistics.median(rows[name]["wall_ms"])) for name in images)
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o", markersize=3)
        if system in ("ours", "ours_compile"):
            for name in ("mix1", "mix4"):
                walls = rows[name]["wall_ms"] if name in rows else []
                axes.scatter(result["inputs"].get(name, [])[: len(walls)], walls, s=4, color=colour, alpha=0.35)
    axes.set(xscale="log", yscale="log", xlabel="rows (patches)", ylabel="ms a call")
    axes.set_xticks(SQUARES, map(str, SQUARES))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(alpha=0.2)
    axes.legend(fontsize=6, frameon=False)


if __name__ == "__main__":
    main()
