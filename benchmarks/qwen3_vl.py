"""Wall milliseconds of a Qwen3-VL vision tower, one whole call: eager, compiled, oracles, and graphed by varlen_graphs.

Run with `make bench`. Random weights, bfloat16. Correctness comes first: a system is timed on an input only if its
output there is about as close to a float32 copy of the tower as the tower's own run is. Rows on the GPU, a synchronize
on both sides of every call. JSON is written after every row, so a run that is cut short keeps what it has.

Systems, in the order they run:
- ours, ours_compile: `vg.recipes.qwen3_vl(tower)` with the default ladder; outputs the caller's own. Of a trace no
  layout was seen before; between two calls of a single size another layout is encoded.
- eager_varlen, eager_sdpa: the tower as transformers runs it, on FlashAttention 2 and on one sdpa call a segment.
- oracle_core: our own forward captured at the exact shape of each layout; the replay alone. Ours is timed again, in
  turn with it.
- oracle_blocks: the unmodified tower likewise, on FlashAttention 2, its metadata computed ahead.
- compile_dynamic: torch.compile(dynamic=True) of the tower, its metadata computed ahead of it in every call.
- compile_reduce_overhead: the same with a recording a layout, timed on few layouts, each recorded before.

Single sizes are summed up by their median, traces by their mean; the host's time is until the call returns.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import (
    check,
    collect,
    distance,
    facts,
    free_gib,
    grow_cache,
    headline,
    measure,
    measure_in_turn,
    reason,
    summary,
    table,
    write_json,
)
from benchmarks.systems import Call, System
from benchmarks.traces import SINGLES, TRACES, Layout, rows_of, trace

SYSTEMS = (
    "ours", "ours_compile", "eager_varlen", "eager_sdpa", "oracle_core", "oracle_blocks", "compile_dynamic",
    "compile_reduce_overhead",
)  # fmt: skip

COARSE = 1.14
"""The step of a ladder of 33 budgets, which is captured for comparison."""

CHECKED_ROWS = 16_384
"""Larger calls are not checked: the float32 reference would take long."""

WARM_UP = 2
"""Untimed calls of a system ahead of each input; of a trace, layouts that are not timed."""

REPEATS_WARM = 3
"""Timed runs of each layout of a trace where a system is measured warm; elsewhere one."""

AT_MOST = {
    "224x224": (2.1, 1.8, 1.3),
    "448x448": (3.4, 3.1, 2.5),
    "672x672": (6.0, 5.3, 4.5),
    "896x896": (12.8, 11.0, 9.0),
    "1344x1344": (38.0, 34.0, 28.0),
    "mix1": (9.0, 8.0, 6.5),
    "mix4": (30.0, 27.0, 22.0),
    "video": (9.5, 8.0, 6.5),
    "burst": (30.0, 27.0, 22.0),
}
"""What is asked of the 8B tower on an H200, ms: at most without compile, at most with it, and the aim with it."""


@dataclass
class Input:
    """One row of the table: the calls that are timed, those that warm up, and the one of these that is checked."""

    timed: list[Call]
    warm_up: list[Call]
    checked: Call | None
    single: bool
    expected: list[Tensor]
    eager_error: float = 0.0


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    options = parse()
    about = facts()
    print(f"{headline(about)}, {options.size} tower, bfloat16\n")
    tower = ways.make_tower(options.size, torch.bfloat16)
    inputs = make_inputs(options)
    fill_expected(tower, inputs)
    result: dict[str, Any] = {**about, "tower": options.size, "dtype": "bfloat16", "seed": options.seed}
    result |= {"inputs": {name: [rows_of(call.layout) for call in one.timed] for name, one in inputs.items()}}
    result |= {"systems": {}, "rows": []}
    deadline = time.perf_counter() + options.minutes * 60
    for name, build in builders(tower, options).items():
        if name not in options.systems:
            continue
        if time.perf_counter() > deadline:
            print(f"{name}: no time left")
            continue
        for row in run_system(name, build, tower, inputs, options, result["systems"], deadline):
            result["rows"].append(row)
            write_json(options.json, result)
            print(line(row), flush=True)
    write_json(options.json, result)
    print(f"\n{report(result)}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SINGLES, *TRACES]
    parser.add_argument("--size", choices=ways.TOWERS, default="8b")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="INPUT", help="; ".join(names))
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of a single size (20)")
    parser.add_argument("--layouts", type=int, default=64, help="timed layouts of a trace (64)")
    parser.add_argument("--oracle-layouts", type=int, default=16, help="of these, how many the oracles capture (16)")
    parser.add_argument("--seconds", type=float, default=4, help="at most so long for one system on one input (4)")
    parser.add_argument("--minutes", type=float, default=20, help="nothing new is begun after so long (20)")
    parser.add_argument("--grid", choices=["gpu", "cpu"], default="gpu", help="where ours finds grid_thw (gpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the traces (0)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# Inputs


def make_inputs(options: argparse.Namespace) -> dict[str, Input]:
    """The calls of every input. All rows are parts of one block of random numbers."""
    layouts: dict[str, list[Layout]] = {}
    for name in options.only:
        layouts[name] = [SINGLES[name]] if name in SINGLES else trace(name, options.layouts + WARM_UP, options.seed)
    largest = max(rows_of(layout) for each in layouts.values() for layout in each)
    source = torch.randn(largest + 16 * (options.layouts + WARM_UP), ways.ROW, device="cuda", dtype=torch.bfloat16)
    inputs = {}
    for name, each in layouts.items():
        calls = [ways.make_call(layout, source, 16 * at) for at, layout in enumerate(each)]
        single = name in SINGLES
        timed, warm_up = (calls, calls * WARM_UP) if single else (calls[:-WARM_UP], calls[-WARM_UP:])
        checked = next((call for call in warm_up if call.rows.shape[0] <= CHECKED_ROWS), None)
        inputs[name] = Input(timed, warm_up, checked, single, expected=[])
    return inputs


def fill_expected(tower: Any, inputs: dict[str, Input]) -> None:
    """Run a float32 copy of the tower, and the tower itself for its own distance to it."""
    exact = copy.deepcopy(tower).float()
    for one in inputs.values():
        if one.checked is not None:
            with torch.no_grad():
                one.expected = ways.tensors(exact(one.checked.rows.float(), grid_thw=one.checked.grid))
            with ways.attention(tower, ways.FLASH2):
                one.eager_error = distance(ways.tensors(ways.run_eager(tower, one.checked)), one.expected)


# Systems


def builders(tower: Any, options: argparse.Namespace) -> dict[str, Callable[[], System]]:
    """What makes each system, in the order they run. The oracle of our core uses the encoder that was measured."""

    @cache
    def ours(compiled: bool) -> System:
        system = ways.graphed(tower, grid_on_host=options.grid == "cpu", capture=vg.options.Capture(compile=compiled))
        if not compiled:
            _, largest = ways.capture_ladder(tower, [system.encoder.budgets[-1]])
            system.build["largest_gib"] = largest["capture_gib"]
            system.build["gib_to_largest"] = system.build["capture_gib"] / largest["capture_gib"]
            _, coarse = ways.capture_ladder(tower, vg.Ladder(step=COARSE))
            system.build["coarse_budgets"], system.build["coarse_capture_s"] = coarse["budgets"], coarse["capture_s"]
        return system

    def oracle() -> System:
        encoder = ours(False).encoder
        assert encoder is not None  # noqa: S101 - ours has one
        return ways.oracle_core(encoder, options.oracle_layouts)

    return {
        "ours": lambda: ours(False),
        "ours_compile": lambda: ours(True),
        "eager_varlen": lambda: System(lambda call: lambda: ways.run_eager(tower, call)),
        "eager_sdpa": lambda: System(lambda call: lambda: ways.run_eager(tower, call), attention="sdpa"),
        "oracle_core": oracle,
        "oracle_blocks": lambda: ways.oracle_blocks(tower, options.oracle_layouts),
        "compile_dynamic": lambda: ways.compile_tower(tower),
        "compile_reduce_overhead": lambda: ways.compile_recorded(tower),
    }


def run_system(
    name: str,
    build: Callable[[], System],
    tower: Any,
    inputs: dict[str, Input],
    options: argparse.Namespace,
    built: dict[str, Any],
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """Rows of one system, as they come; what it cost goes to `built`. A failure is a row as well."""
    collect()
    free, allocated = free_gib(), torch.cuda.memory_allocated()
    try:
        system = build()
    except Exception as failure:
        yield {"system": name, "input": "all", "failed": reason(failure)}
        return
    built[name] = cost = system.build
    with ways.attention(tower, system.attention):
        for input_name, one in inputs.items():
            if time.perf_counter() > deadline:
                yield {"system": name, "input": input_name, "failed": "no time left"}
                continue
            yield {"system": name, "input": input_name, **try_input(system, one, options)}
            peak = (torch.cuda.max_memory_allocated() - allocated) / 2**30
            cost["peak_gib"] = max(cost.get("peak_gib", 0), peak)
    collect()
    cost["held_gib"] = free - free_gib()


def try_input(system: System, one: Input, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time a system on an input, or say why not."""
    try:
        return time_input(system, one, options)
    except Exception as failure:
        return {"failed": reason(failure)}


def time_input(system: System, one: Input, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time a system on an input: one wall a repeat of a single size, one wall a layout of a trace."""
    row: dict[str, Any] = {}
    compiled_before = system.compiled_graphs and system.compiled_graphs()
    if one.checked is not None:
        run = system.prepare(one.checked)  # held until its result was read: an oracle's graph must outlive its replay
        row["error"] = distance(ways.tensors(run()), one.expected)
        del run
        row["eager_error"] = one.eager_error
        check(row["error"], one.eager_error)
    grow_cache()
    torch.cuda.reset_peak_memory_stats()
    if not system.ahead:
        for call in one.warm_up:
            system.prepare(call)()
    walls: list[float] = []
    hosts: list[float] = []
    besides: list[float] = []
    start = time.perf_counter()
    for call in one.timed[: system.most_layouts]:
        run = system.prepare(call)
        for _ in range(system.ahead):
            run()
        left = options.seconds - (time.perf_counter() - start)
        if system.beside is not None:
            repeats = options.repeats if one.single else REPEATS_WARM
            (wall, host), (other, _) = measure_in_turn([run, system.beside(call)], repeats, options.seconds)
            walls += wall if one.single else [statistics.median(wall)]
            besides += other if one.single else [statistics.median(other)]
            hosts += host
        elif one.single:
            walls, hosts = measure(run, options.repeats, left, system.between)
        else:
            wall, host = measure(run, REPEATS_WARM if system.ahead else 1, options.seconds)
            walls.append(statistics.median(wall))
            hosts.append(statistics.median(host))
        del run
        if left < 0 and not system.ahead:
            break
    row |= summary(walls, hosts)
    if system.encoder is not None:
        row |= ways.padding_share(system.encoder, one.timed[: len(walls)])
    if system.compiled_graphs is not None:
        row["recompiles"] = system.compiled_graphs() - compiled_before
    return row | ({"beside_ms": besides} if besides else {}) | {"wall_ms": walls}


# Reports


def line(row: dict[str, Any]) -> str:
    """A row as it is printed when it comes."""
    start = f"{row['system']:<24}{row['input']:<21}"
    if "failed" in row:
        return f"{start}failed: {row['failed']}"
    figures = (
        f"mean {row['mean_ms']:7.2f}  p50 {row['p50_ms']:7.2f}  p99 {row['p99_ms']:7.2f}  host {row['host_ms']:7.3f}"
    )
    error = f"  error {row['error']:.2e} (eager {row['eager_error']:.2e})" if "error" in row else "  unchecked"
    padding = f"  padding {row['padding']:.1%}, {row['eager_runs']} eager" if "padding" in row else ""
    recompiles = f"  recompiles {row['recompiles']}" if row.get("recompiles") else ""
    return f"{start}{figures}  of {len(row['wall_ms'])}{error}{padding}{recompiles}"


def report(result: dict[str, Any]) -> str:
    """All tables of a finished run."""
    rows = {(row["system"], row["input"]): row for row in result["rows"] if "failed" not in row}
    failed = [line(row) for row in result["rows"] if "failed" in row]
    parts = [
        "ms; traces: the mean over the layouts that all systems but reduce-overhead were timed on",
        walls_table(result, rows),
        "ours against the targets and the others, on the layouts that both were timed on",
        ratios_table(result, rows),
        "ours, on all layouts",
        ours_table(result, rows),
        "what systems cost",
        costs_table(result),
        *failed,
    ]
    return "\n\n".join(part for part in parts if part)


Rows = dict[tuple[str, str], dict[str, Any]]


def typical(name: str, walls: list[float]) -> float:
    """Median of a single size, mean of a trace."""
    return statistics.median(walls) if name in SINGLES else statistics.fmean(walls)


def walls_table(result: dict[str, Any], rows: Rows) -> str:
    """Inputs down, systems across."""
    present = [system for system in SYSTEMS if any(of == system for of, _ in rows)]
    lines = []
    for name in result["inputs"]:
        walls = {system: rows[system, name]["wall_ms"] for system in present if (system, name) in rows}
        counts = [len(each) for system, each in walls.items() if system != "compile_reduce_overhead"]
        shared = None if name in SINGLES else min(counts, default=None)
        cells = [typical(name, walls[system][:shared]) if system in walls else None for system in present]
        lines.append((name, *cells))
    return table(("input", *present), lines)


def ratio(rows: Rows, name: str, ours: str, other: str) -> float | None:
    """The wall of ours over another's on an input, on the layouts that both were timed on, in turn if they were."""
    if (ours, name) not in rows or (other, name) not in rows:
        return None
    a, b = rows[ours, name]["wall_ms"], rows[other, name]["wall_ms"]
    if ours == "ours":
        a = rows[other, name].get("beside_ms", a)
    shared = None if name in SINGLES else min(len(a), len(b))
    return typical(name, a[:shared]) / typical(name, b[:shared])


def ratios_table(result: dict[str, Any], rows: Rows) -> str:
    """Targets beside what was measured, on all layouts, and ratios: below 1 is faster than the other."""
    header = (
        "input", "ours", "at most", "compile", "at most", "aim", "ours / its core", "compile / its core",
        "ours / best eager", "compile / best eager", "ours / blocks", "compile / blocks",
    )  # fmt: skip
    lines = []
    for name in result["inputs"]:
        targets = AT_MOST.get(name) if result["tower"] == "8b" else None
        limits = targets or (None, None, None)
        plain, fused = (
            typical(name, rows[ours, name]["wall_ms"]) if (ours, name) in rows else None
            for ours in ("ours", "ours_compile")
        )
        against_eager = [
            max((r for other in ("eager_varlen", "eager_sdpa") if (r := ratio(rows, name, ours, other))), default=None)
            for ours in ("ours", "ours_compile")
        ]
        lines.append(
            (
                name, plain, limits[0], fused, limits[1], limits[2],
                ratio(rows, name, "ours", "oracle_core"), ratio(rows, name, "ours_compile", "oracle_core"),
                *against_eager,
                ratio(rows, name, "ours", "oracle_blocks"), ratio(rows, name, "ours_compile", "oracle_blocks"),
            )
        )  # fmt: skip
    return table(header, lines)


def ours_table(result: dict[str, Any], rows: Rows) -> str:
    """Everything about our own rows."""
    header = ("input", "system", "mean", "P50", "P99", "host", "padding", "eager runs", "error", "eager error")
    lines = []
    for name in result["inputs"]:
        for system in ("ours", "ours_compile"):
            if row := rows.get((system, name)):
                figures = [row[key] for key in ("mean_ms", "p50_ms", "p99_ms")]
                errors = [f"{row[key]:.2e}" if key in row else None for key in ("error", "eager_error")]
                padding = f"{row['padding']:.1%}"
                lines.append((name, system, *figures, f"{row['host_ms']:.3f}", padding, row["eager_runs"], *errors))
    return table(header, lines)


def costs_table(result: dict[str, Any]) -> str:
    """Seconds and GiB beside the weights."""
    header = (
        "system", "compile s", "capture s, kernels compiled", "capture s", "timing s", "budgets", "capture GiB",
        "to the largest alone", "held GiB", "peak GiB",
    )  # fmt: skip
    keys = (
        "compile_s", "capture_cold_s", "capture_s", "timing_s", "budgets", "capture_gib", "gib_to_largest", "held_gib",
        "peak_gib",
    )  # fmt: skip
    return table(header, [(name, *(built.get(key) for key in keys)) for name, built in result["systems"].items()])


if __name__ == "__main__":
    main()
