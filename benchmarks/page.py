"""Write the tables of the pages of benchmarks from the JSON beside them: `make plots`.

A table stands between `<!-- table: NAME RESULT -->` and `<!-- end -->`, where RESULT is the name of a JSON file. So the
pages say what was measured, and nothing is copied by hand.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import percentile, table
from benchmarks.coverage import page as coverage
from benchmarks.traces import SINGLES, TRACES

PAGES = [
    *map(Path, ("docs/benchmarks.md", "docs/benchmarks-history.md", "docs/appendix-coverage.md", "docs/engines.md"))
]
"""The newest commit's figures, those of earlier ones, what `vg.wrap` makes of transformers' models, and engines."""

PLACE = re.compile(r"(<!-- table: (\w+) (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

NAMES = {
    "eager_varlen": "eager, FA2", "eager_sdpa": "eager, sdpa", "compile_dynamic": "compile, dynamic",
    "compile_reduce_overhead": "compile, reduce-overhead", "oracle_blocks": "exact graph of the tower",
    "oracle_core": "exact graph of ours", "ours": "graphed", "ours_compile": "graphed, compiled",
}  # fmt: skip
"""What the page calls the systems, in its order."""

ENCODERS = ["eager", "compiled", "exact", "padded", "wrapped", "fused"]
"""The systems of `benchmarks.encoders`."""

Result = dict[str, Any]
Rows = dict[tuple[str, str], dict[str, Any]]


def rows_of(result: Result) -> Rows:
    """The rows of a tower's result that did not fail, by system and input."""
    return {(row["system"], row["input"]): row for row in result["rows"] if "failed" not in row}


def present(rows: Rows) -> list[str]:
    """The systems that were timed."""
    return [name for name in NAMES if any(system == name for system, _ in rows)]


def bold(value: float | None) -> str | None:
    """Ours stand out."""
    return None if value is None else f"**{value:.2f}**"


def walls(result: Result, inputs: list[str], summed: Callable[[list[float]], float], shared: bool) -> str:
    """Inputs down, systems across, milliseconds; `shared`: over the layouts that all but recordings were timed on."""
    rows = rows_of(result)
    systems = present(rows)
    lines = []
    for name in (name for name in inputs if ("ours", name) in rows):
        own = {system: rows[system, name]["wall_ms"] for system in systems if (system, name) in rows}
        counts = [len(each) for system, each in own.items() if system != "compile_reduce_overhead"]
        count = min(counts) if shared else None
        values = {system: summed(each[:count]) for system, each in own.items()}
        cells = [bold(values.get(s)) if s.startswith("ours") else values.get(s) for s in systems]
        lines.append((name, *cells, *([count] if shared else [])))
    return table(("ms", *(NAMES[system] for system in systems), *(["layouts"] if shared else [])), lines)


def singles(result: Result) -> str:
    """Medians of single sizes."""
    return walls(result, list(SINGLES), statistics.median, shared=False)


def traces(result: Result) -> str:
    """Means of traces."""
    return walls(result, list(TRACES), statistics.fmean, shared=True)


def calls(result: Result) -> str:
    """Everything about our own calls."""
    lines = []
    rows = rows_of(result)
    for name in [*SINGLES, *TRACES]:
        for system in ("ours", "ours_compile"):
            if row := rows.get((system, name)):
                walls = row["wall_ms"]
                figures = (statistics.fmean(walls), percentile(walls, 0.5), percentile(walls, 0.99), row["host_ms"])
                error = f"{row['error']:.2e}, {row['eager_error']:.2e}"
                lines.append((name, NAMES[system], len(walls), *figures, f"{row['padding']:.1%}", error))
    header = ("ms", "", "calls", "mean", "P50", "P99", "host", "padding", "error, that of eager")
    return table(header, lines)


def ratios(result: Result) -> str:
    """Ours over the others, on the layouts that both were timed on."""
    rows = rows_of(result)
    others = [system for system in present(rows) if not system.startswith("ours")]
    lines = []
    for name in (name for name in [*SINGLES, *TRACES] if ("ours", name) in rows):
        cells: list[float | None] = []
        for other in others:
            cell = None
            if (other, name) in rows:
                theirs = rows[other, name]["wall_ms"]
                ours = rows[other, name].get("beside_ms", rows["ours", name]["wall_ms"])
                count = None if name in SINGLES else min(len(ours), len(theirs))
                middle = statistics.median if name in SINGLES else statistics.fmean
                cell = middle(ours[:count]) / middle(theirs[:count])
            cells.append(cell)
        lines.append((name, *cells))
    return table(("graphed over", *(NAMES[other] for other in others)), lines)


def in_turn(result: Result) -> str:
    """Ours beside exact graphs of ours, replayed in turn."""
    rows = rows_of(result)
    lines = []
    for name in (name for name in [*SINGLES, *TRACES] if ("oracle_core", name) in rows):
        row = rows["oracle_core", name]
        middle = statistics.median if name in SINGLES else statistics.fmean
        exact, ours = middle(row["wall_ms"]), middle(row["beside_ms"])
        padding = f"{rows['ours', name]['padding']:.1%}"
        lines.append((name, exact, bold(ours), ours / exact, padding, rows["ours", name]["host_ms"]))
    return table(("ms", "exact graph of ours", "graphed", "ratio", "padding", "host"), lines)


def attention(result: Result) -> str:
    """Attention, microseconds a layer."""
    lines = []
    for row in result["rows"]:
        fa2, padded, fa3, fa4, fa4_many, dense, ours, few, many, triton = (
            row.get(f"{system}_us")
            for system in (
                "fa2_exact", "fa2_padded", "fa3_256", "fa4_exact", "fa4_256", "cudnn", "ours_exact", "ours_64",
                "ours_256", "triton_256",
            )
        )  # fmt: skip
        rate = row["tflop"] / ours * 1e6
        ratios = fa2 / ours, fa3 / many if fa3 else None, many / ours
        others = fa2, padded, fa3, fa4, fa4_many, dense
        lines.append((row["row"], *others, bold(ours), few, many, triton, *ratios, f"{rate:.0f}"))
    header = (
        "head dim, lengths", "FA2", "FA2 padded", "FA3", "FA4", "FA4, 256 slots", "cuDNN", "ours", "64 slots",
        "256 slots", "triton", "FA2 / ours", "FA3 / ours", "256 / ours", "TFLOP/s",
    )  # fmt: skip
    return table(header, lines)


def breakdown(result: Result) -> str:
    """Kinds of kernels down, inputs across, milliseconds, and the launches of the last."""
    inputs = list(dict.fromkeys(row["input"] for row in result["rows"]))
    times: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        times.setdefault(row["kind"], {})[row["input"]] = row["gpu_us"] / 1e3
    launches = {row["kind"]: row["launches"] for row in result["rows"] if row["input"] == inputs[-1]}
    rows = [next(row["rows"] for row in result["rows"] if row["input"] == name) for name in inputs]
    header = ("ms", *(f"{name}, {count} rows" for name, count in zip(inputs, rows, strict=True)), "launches")
    lines = [(kind, *(times[kind].get(name) for name in inputs), launches.get(kind)) for kind in times]
    return table(header, lines)


def plain(*keys: str) -> Callable[[Result], str]:
    """The columns of a result as they are."""

    def make(result: Result) -> str:
        return table([re.sub(r"_(us|ms|s)$", r", \1", key).replace("_", " ") for key in keys], [
            [f"{row[key]:.1e}" if key.endswith("error") else row.get(key) for key in keys] for row in result["rows"]
        ])  # fmt: skip

    return make


def row_counts(result: Result) -> str:
    """Nanoseconds a row by residue."""
    residues = sorted({row["residue"] for row in result["rows"]})
    lines: dict[tuple[str, int], list[float]] = {}
    for row in result["rows"]:
        lines.setdefault((row["encoder"], row["rows"]), []).append(row["ns_per_row"])
    header = ("encoder", "rows from", *(f"128 k + {residue}" for residue in residues))
    return table(header, [(*key, *values) for key, values in lines.items()])


def parallel(result: Result) -> str:
    """Calls that several GPUs share, medians, and how many times as fast as one GPU they are."""
    walls = {(row["system"], row["input"]): statistics.median(row["wall_ms"]) for row in result["rows"]}
    inputs = list(dict.fromkeys(row["input"] for row in result["rows"]))
    lines = []
    for name in inputs:
        eager, one, shared = (walls["parallel_eager", name], walls["one", name], walls["parallel", name])
        weights = walls.get(("tensor", name))
        lines.append((name, eager, one, bold(shared), walls["gather", name], weights, one / shared, eager / shared))
    count = result["ranks"]
    header = (
        "ms", f"eager, {count} GPUs", "graphed, one GPU", f"graphed, {count} GPUs", "of that, gather",
        "weights spread", "one / all", "eager / graphed",
    )  # fmt: skip
    return table(header, lines)


def plan(result: Result) -> str:
    """Budgets for a trace: what was expected of them, and what they take."""
    header = (
        "budgets", "graphs", "padding", "expected, ms", "measured alone, ms", "in a stream, ms", "expected / alone",
        "expected / stream", "padding of later calls", "GiB expected", "GiB",
    )  # fmt: skip
    lines = []
    for row in result["rows"]:
        expected, alone, calls = (row[f"{key}_ms"] for key in ("expected", "alone", "calls"))
        padding, later = (f"{row[key]:.1%}" for key in ("padding", "later_padding"))
        times = (expected, alone, calls, expected / alone, expected / calls)
        lines.append((row["budgets"], row["graphs"], padding, *times, later, row["expected_gib"], row["capture_gib"]))
    return table(header, lines)


def ladder(result: Result) -> str:
    """Ladders, coarse to fine: seconds, and milliseconds of each trace over those of the finest."""
    finest = max(result["rows"], key=lambda row: row["budgets"])
    lines = []
    for row in result["rows"]:
        traces = (row["ms"][name] / finest["ms"][name] for name in TRACES)
        start = row["capture_s"] + row["timing_s"]
        lines.append((f"{row['step']:g}", row["budgets"], start, row["capture_gib"], *traces))
    return table(("step", "graphs", "capture, s", "GiB", *TRACES), lines)


def service(result: Result) -> str:
    """Start and memory of several models in one process."""
    figures = {
        "Qwen3-VL, s": "qwen3_vl_s", "SigLIP, s": "siglip_s", "BERT, s": "bert_s", "start, s": "start_s",
        "weights, s": "weights_s", "all graphs, s": "capture_s", "graphs": "graphs", "pools, GiB": "pools_gib",
        "beside, GiB": "beside_gib", "taken, GiB": "taken_gib",
    }  # fmt: skip
    lines = [(row["cache"], row["pool"], *(row[key] for key in figures.values())) for row in result["service"]]
    return table(("cache", "pool", *figures), lines)


def replicas(result: Result) -> str:
    """Requests a second of two processes on one GPU."""
    lines = []
    for row in result["replicas"]:
        alone, together = row.get("alone_per_s"), row.get("together_per_s")
        lines.append((row["mps"], alone, together, together / alone if alone and together else None))
    return table(("MPS", "one, 1/s", "both, 1/s", "both / one"), lines)


TABLES: dict[str, Callable[[Result], str]] = {
    "singles": singles,
    "traces": traces,
    "calls": calls,
    "ratios": ratios,
    "in_turn": in_turn,
    "attention": attention,
    "rotary": plain("head_dim", "rows", "torch_us", "compiled_us", "ours_us"),
    "metadata": plain("buffer", "rows", "items", "kernel_us", "torch_us"),
    "interpolation": plain("mode", "rows", "items", "kernel_us", "torch_us", "by_item_us", "error"),
    "row_counts": row_counts,
    "breakdown": breakdown,
    "families": plain("family", "input", "rows", "eager_ms", "exact_ms", "graphed_ms"),
    "automatic": plain("family", "input", "rows", "eager_ms", "exact_ms", "automatic_ms", "graphed_ms"),
    "modules": plain("module", "input", "eager_ms", "compiled_ms", "wrapped_ms", "compiled_start_s", "wrapped_start_s"),
    "encoders": plain("model", "batch", "tokens", "kernels_ms", *(f"{name}_ms" for name in ENCODERS)),
    "encoders_in_row": plain("model", "batch", *(f"{name}_in_row_ms" for name in ENCODERS)),
    "sentences": plain("dtype", "texts", "mean_tokens", "tokenizer_s", "eager_s", "wrapped_s", "error"),
    "first_call": plain("cache", "made_s", "first_s", "graphs", "longest_s", "new_s", "again_s"),
    "generate": plain("prompt", "tokens", "model_ms", "wrapped_ms", "same_tokens"),
    "plan": plan,
    "ladder": ladder,
    "parallel": parallel,
    "host": plain("layout", "median_us", "p90_us", "p99_us"),
    "coverage": coverage.rows,
    "coverage_counts": coverage.counts,
    "outside": plain("package", "module", "encoder", "outcome", "error", "why"),
    "pixels": plain(
        "images",
        "patches",
        "resize_ms",
        "processor_ms",
        "eager_ms",
        "graphs_ms",
        "from_images_ms",
        "eager_error",
        "error",
    ),
    "serving": plain("served", "clients", "system", "requests_s", "p50_ms", "p99_ms"),
    "service": service,
    "replicas": replicas,
    "vllm": plain("size", "own_encoder_ms", "fine_encoder_ms", "encoder_ms", "own_ttft_ms", "fine_ttft_ms", "ttft_ms"),
    "sglang": plain("size", "own_encoder_ms", "encoder_ms", "own_ttft_ms", "ttft_ms"),
    "proof": plain("capture", "total_s", "captured_s", "proven_s", "timed_s"),
}


def filled(text: str, results: Path) -> str:
    """A page with its tables as the results in a folder give them."""

    def fill(place: re.Match[str]) -> str:
        made = TABLES[place[2]](json.loads((results / f"{place[3]}.json").read_text()))
        return f"{place[1]}\n{made}\n\n{place[5]}"

    return PLACE.sub(fill, text)


def main() -> None:
    """Fill the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES, help="the pages to fill")
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks"), help="the folder with the results")
    options = parser.parse_args()
    for page in options.page:
        page.write_text(filled(page.read_text(), options.json))


if __name__ == "__main__":
    main()
