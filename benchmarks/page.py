"""Write the tables of the pages of benchmarks from the JSON beside them: `make plots`.

A table stands between `<!-- table: NAME RESULT ... -->` and `<!-- end -->`, where each RESULT is the name of a JSON
file. So the pages say what was measured, and nothing is copied by hand. The CSV files of docs/appendix-coverage.md are
written too, beside the folder of the results.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import table
from benchmarks.coverage import page as coverage
from benchmarks.traces import SINGLES

PAGES = [Path(f"docs/{name}.md") for name in ("benchmarks", "appendix-coverage", "engines")]
"""The pages that have tables of results."""

PLACE = re.compile(r"(<!-- table: (\w+) (\w+(?: \w+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

EAGER = ("eager_varlen", "eager_sdpa")
"""The tower of transformers on FlashAttention 2 and on sdpa; the faster one counts, input by input."""

TOWER_INPUTS = ("224x224", "896x896", "1344x1344", "4 of 448x448", "mix4", "video", "burst")

ATTENTION_ROWS = ("72, 196", "72, 49 x 64", "72, 32 x 196", "72, 7056", "64, 7056", "128, 7056", "128, 16 x 1024")

TEXT_MODELS = ("MiniLM-L6", "BERT-base", "ModernBERT-base", "Qwen3-Embedding-0.6B")

BATCHES = {
    "SigLIP so400m": (1, 32), "Pixtral 12B": (1, 4), "Whisper large v3": (1, 4),
}  # fmt: skip
"""The batches that a table shows of models that are not of text."""

FAMILY_INPUTS = ("224x224", "4 of 448x448")

Result = dict[str, Any]


def milliseconds(result: Result, name: str) -> dict[str, float]:
    """What each system takes for an input: the median of a single size, the mean of the layouts of a trace.

    Of a trace the layouts count that all systems were timed on.
    """
    walls = {row["system"]: row["wall_ms"] for row in result["rows"] if row["input"] == name and "failed" not in row}
    if name in SINGLES:
        return {system: statistics.median(each) for system, each in walls.items()}
    count = min(len(each) for each in walls.values())
    return {system: statistics.fmean(each[:count]) for system, each in walls.items()}


def eager(times: dict[str, float]) -> float:
    """What the eager tower takes with the faster attention."""
    return min(times[system] for system in EAGER)


def bold(value: float | None) -> str | None:
    """Ours stand out."""
    return None if value is None else f"**{value:.2f}**"


def towers(large: Result, small: Result) -> str:
    """Inputs down, systems across, milliseconds of the towers of 8B and of 2B."""
    lines = []
    for name in TOWER_INPUTS:
        of_8b, of_2b = milliseconds(large, name), milliseconds(small, name)
        first = eager(of_8b), of_8b["compile_dynamic"], of_8b["oracle_blocks"], bold(of_8b["ours"])
        lines.append((name, *first, eager(of_2b), of_2b["oracle_blocks"], bold(of_2b["ours"])))
    header = ("ms", "8B: eager", "torch.compile", "exact graph", "graphed", "2B: eager", "exact graph", "graphed")
    return table(header, lines)


def attention(result: Result) -> str:
    """Attention, microseconds a layer."""
    header = ("head dim, lengths", "FA2", "FA3", "FA4", "cuDNN", "varlen_attention")
    systems = ("fa2_exact", "fa3_256", "fa4_256", "cudnn")
    rows = {row["row"]: row for row in result["rows"]}
    lines = [
        (name, *(rows[name].get(f"{system}_us") for system in systems), bold(rows[name]["ours_256_us"]))
        for name in ATTENTION_ROWS
    ]
    return table(header, lines)


def families(result: Result) -> str:
    """Towers down, two inputs across, milliseconds."""
    rows = {(row["family"], row["input"]): row for row in result["rows"]}
    lines = []
    for family in dict.fromkeys(family for family, _ in rows):
        both = [rows[family, name] for name in FAMILY_INPUTS]
        cells = [(row["eager_ms"], row["exact_ms"], bold(row["graphed_ms"])) for row in both]
        lines.append((family, *(cell for each in cells for cell in each)))
    header = [f"{name}: eager, exact graph, graphed".split(", ") for name in FAMILY_INPUTS]
    return table(("ms", *header[0], *header[1]), lines)


def texts(result: Result) -> str:
    """Text encoders, milliseconds of the smallest and the largest batch."""
    header = ("ms", "batch", "eager", "torch.compile", "padded graphs", "wrapped", "wrapped, compiled")
    rows = {(row["model"], row["batch"]): row for row in result["rows"]}
    lines = []
    for model, batch in ((model, batch) for model in TEXT_MODELS for batch in (1, 32)):
        row = rows[model, batch]
        times = (row.get(f"{system}_ms") for system in ("eager", "compiled", "padded"))
        lines.append((model, batch, *times, bold(row["wrapped_ms"]), row.get("fused_ms")))
    return table(header, lines)


def sentences(result: Result) -> str:
    """Milliseconds a text of `SentenceTransformer.encode`, and seconds of the first pass over all texts."""
    lines = []
    for row in result["rows"]:
        times = [1e3 * row[f"{system}_s"] / row["texts"] for system in ("eager", "compiled", "wrapped", "tokenizer")]
        times[2] = bold(times[2])
        lines.append((row["model"], row["batch"], *times, row["compiled_first_s"], row["wrapped_first_s"]))
    header = ("ms a text", "batch", "eager", "compiled", "wrapped", "tokenizer", "first: compiled, s", "wrapped, s")
    return table(header, lines)


def wrapped(result: Result) -> str:
    """Models of images and sound that `vg.wrap` declares by itself, milliseconds."""
    rows = {(row["model"], row["batch"]): row for row in result["rows"]}
    lines = []
    for model, batch in ((model, batch) for model, batches in BATCHES.items() for batch in batches):
        row = rows[model, batch]
        lines.append((model, batch, row["eager_ms"], row["compiled_ms"], row.get("exact_ms"), bold(row["wrapped_ms"])))
    return table(("ms", "batch", "eager", "torch.compile", "exact graph", "wrapped"), lines)


def modules(result: Result) -> str:
    """Modules of other packages: milliseconds of a call, and seconds until all inputs were answered twice."""
    lines = [
        (row["module"], row["input"], row["eager_ms"], row.get("compiled_ms"), bold(row["wrapped_ms"]),
         row.get("compiled_start_s"), row["wrapped_start_s"])
        for row in result["rows"]
        if not row["input"].startswith("4 of")
    ]  # fmt: skip
    names = ("ms", "input", "eager", "torch.compile", "wrapped", "torch.compile ready after, s", "wrapped, s")
    return table(names, lines)


def steps(result: Result) -> str:
    """Steps of diffusion transformers: milliseconds of a call, and seconds of the first one of each input."""
    rows = {(row["module"], row["input"], row["system"]): row for row in result["rows"]}
    lines = []
    for module, given in dict.fromkeys((module, given) for module, given, _ in rows):
        own, fused = rows[module, given, "wrapped"], rows.get((module, given, "fused"))
        more = (None, None) if fused is None else (fused["third_ms"], fused["first_s"])
        lines.append((module, given, own["eager_ms"], bold(own["third_ms"]), more[0], own["first_s"], more[1]))
    names = ("ms", "input", "eager", "wrapped", "wrapped, compiled", "first call, s", "compiled, s")
    return table(names, lines)


def serving(result: Result) -> str:
    """Requests a second of one client and of many."""
    rows = {(row["served"], row["clients"], row["system"]): row for row in result["rows"]}
    lines = []
    for served, clients in dict.fromkeys((served, clients) for served, clients, _ in rows):
        if clients != 8:
            systems = (rows.get((served, clients, name)) for name in ("as it is", "wrapped", "from pixels"))
            lines.append((served, clients, *(f"{row['requests_s']:.0f}" if row else None for row in systems)))
    return table(("requests a second", "clients", "unwrapped", "wrapped", "wrapped, from pixels"), lines)


def pixels(result: Result) -> str:
    """From decoded images to features, milliseconds."""
    keys = ("eager_ms", "graphs_ms", "from_images_ms", "on_gpu_ms", "tower_ms")
    lines = [
        (row["images"], *(bold(row[key]) if key in ("from_images_ms", "on_gpu_ms") else row[key] for key in keys))
        for row in result["rows"]
    ]
    names = ("processor, eager tower", "processor, graphs", "from_images", "from_images on the GPU", "tower alone")
    return table(("ms", *names), lines)


def start(calls: Result, ladders: Result) -> str:
    """Seconds until calls are answered, with nothing compiled and with kernels compiled before."""
    cold, *warm = calls["rows"]
    built = ladders["systems"]["ours"]
    lines = [
        (name, cold[key], max(row[key] for row in warm))
        for name, key in (("first call", "first_s"), ("slowest of 32 new calls", "longest_s"))
    ]
    lines.append((f"`capture()` of {built['budgets']} graphs", built["capture_cold_s"], built["capture_s"]))
    lines.append((f"`capture()` of {built['coarse_budgets']} graphs", None, built["coarse_capture_s"]))
    lines.append(("torch.compile", ladders["systems"]["compile_dynamic"]["compile_s"], None))
    return table(("seconds", "nothing compiled yet", "kernels compiled"), lines)


def ladder(result: Result) -> str:
    """Ladders by their step: graphs, seconds and memory of a capture, padding and time of calls."""
    finest = max(result["rows"], key=lambda row: row["budgets"])["ms"]
    lines = []
    for row in result["rows"]:
        shares = row["padding"].values()
        padding = f"{min(shares):.1%} to {max(shares):.1%}"
        ratio = statistics.geometric_mean(ms / finest[name] for name, ms in row["ms"].items())
        keys = ("step", "budgets", "capture_s", "capture_gib")
        lines.append((*(row[key] for key in keys), padding, f"{ratio:.3f}"))
    return table(("step", "graphs", "capture, s", "GiB", "padding", "time of calls"), lines)


def parallel(*results: Result) -> str:
    """Calls that several GPUs share, medians of milliseconds."""
    walls = [
        {(row["system"], row["input"]): statistics.median(row["wall_ms"]) for row in result["rows"]}
        for result in results
    ]
    lines = []
    for name in dict.fromkeys(row["input"] for row in results[0]["rows"]):
        shared = [bold(each["parallel", name]) for each in walls]
        lines.append((name, walls[0]["one", name], *shared, walls[0]["tensor", name]))
    counts = [f"{result['ranks']} GPUs" for result in results]
    return table(("ms", "one GPU", *counts, f"{counts[0]}, weights spread"), lines)


def plan(result: Result) -> str:
    """Budgets for a trace: their number, padding, time and memory."""
    lines = [
        (row["budgets"], row["graphs"], f"{row['padding']:.1%}", row["calls_ms"], row["capture_gib"])
        for row in result["rows"]
    ]
    return table(("budgets", "graphs", "padding", "ms a call", "GiB"), lines)


def plain(*keys: str) -> Callable[[Result], str]:
    """The columns of a result as they are."""

    def make(result: Result) -> str:
        return table([re.sub(r"_(us|ms|s)$", r", \1", key).replace("_", " ") for key in keys], [
            [f"{row[key]:.1e}" if key.endswith("error") else row.get(key) for key in keys] for row in result["rows"]
        ])  # fmt: skip

    return make


TABLES: dict[str, Callable[..., str]] = {
    "towers": towers,
    "attention": attention,
    "families": families,
    "texts": texts,
    "sentences": sentences,
    "wrapped": wrapped,
    "serving": serving,
    "pixels": pixels,
    "start": start,
    "ladder": ladder,
    "modules": modules,
    "steps": steps,
    "parallel": parallel,
    "plan": plan,
    "coverage_totals": coverage.totals,
    "coverage_incomplete": coverage.incomplete,
    "coverage_outside": coverage.outside,
    "vllm": plain("size", "own_encoder_ms", "fine_encoder_ms", "encoder_ms", "own_ttft_ms", "fine_ttft_ms", "ttft_ms"),
    "sglang": plain("size", "own_encoder_ms", "encoder_ms", "own_ttft_ms", "ttft_ms"),
}


def read(folder: Path, name: str) -> Result:
    """A result of a folder."""
    result: Result = json.loads((folder / f"{name}.json").read_text())
    return result


def filled(text: str, results: Path) -> str:
    """A page with its tables as the results in a folder give them."""

    def fill(place: re.Match[str]) -> str:
        made = TABLES[place[2]](*(read(results, name) for name in place[3].split()))
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
    for name, text in coverage.csv_files(options.json).items():
        (options.json.parent / name).write_text(text)


if __name__ == "__main__":
    main()
