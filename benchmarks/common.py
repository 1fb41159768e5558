"""What all benchmarks share: facts, clocks, captured graphs, the correctness gate, tables and JSON."""

import csv
import gc
import importlib.metadata
import io
import json
import math
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from varlen_graphs.capture.memsets import memsets_to_kernels

Line = TypeVar("Line")

LARGEST_ERROR = 5e-2
"""No result further than this from float32, in relative L2, is timed."""


CACHE = 6 << 30
"""Bytes that torch's allocator is given ahead of timed calls."""


class WrongResultError(RuntimeError):
    """A system's result is too far from the float32 reference: it is not timed."""


# Facts


def facts() -> dict[str, Any]:
    """The device and the versions a figure holds for."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
    }


def headline(facts: dict[str, Any]) -> str:
    """The facts in one line."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "cuda", "triton", "transformers", "python"))
    return f"{facts['device']}, {versions}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Clocks


def measure(
    run: Callable[[], Any], repeats: int, seconds: float, before: Callable[[], Any] | None = None
) -> tuple[list[float], list[float]]:
    """Wall milliseconds of each call with a synchronize on both sides, and milliseconds of the host until it returns.

    Stops after `repeats` calls, or once `seconds` have passed. What `before` does ahead of each call is not timed.
    """
    walls: list[float] = []
    hosts: list[float] = []
    deadline = time.perf_counter() + seconds
    with collector_off():
        while len(walls) < repeats and (not walls or time.perf_counter() < deadline):
            if before is not None:
                before()
            torch.cuda.synchronize()
            start = time.perf_counter()
            output = run()
            hosts.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            walls.append((time.perf_counter() - start) * 1e3)
            del output
    return walls, hosts


def measure_in_turn(
    runs: Sequence[Callable[[], Any]], repeats: int, seconds: float, warm: bool = False
) -> list[tuple[list[float], list[float]]]:
    """`measure` of several runs, each once before any is measured again: a chip that gets slower is slower for all.

    If `warm`, each run that is measured follows one that is not, whose end the host polls: its caches then hold nothing
    of another system, nor of a wait in CUDA.
    """
    measured: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    deadline = time.perf_counter() + seconds
    while len(measured[0][0]) < repeats and (not measured[0][0] or time.perf_counter() < deadline):
        for run, (walls, hosts) in zip(runs, measured, strict=True):
            wall, host = measure(run, 1, seconds, before=partial(_warm, run) if warm else None)
            walls += wall
            hosts += host
    return measured


def _warm(run: Callable[[], Any]) -> None:
    run()
    stream = torch.cuda.current_stream()
    while not stream.query():
        pass


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector out: with torch and transformers loaded, one full collection takes 0.2 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(walls: Sequence[float], hosts: Sequence[float]) -> dict[str, float]:
    """Mean, P50 and P99 of the wall, and the median of the host."""
    return {
        "mean_ms": statistics.fmean(walls),
        "p50_ms": percentile(walls, 0.5),
        "p99_ms": percentile(walls, 0.99),
        "host_ms": statistics.median(hosts),
    }


def capture(run: Callable[[], Any], launches: int = 1, kernels_alone: bool = False) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture so many runs in one graph, after one warm-up run; also returns what the last of them gave.

    The caller keeps alive what `run` reads. Warm-up and capture use one stream, so that what cuBLAS keeps for a stream
    is not part of the graph's own memory. With `kernels_alone` memsets become kernels, as in our own graphs.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph, output = torch.cuda.CUDAGraph(keep_graph=True), None
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            output = run()
    if kernels_alone:
        memsets_to_kernels(graph, stream)
    graph.instantiate()
    return graph, output


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def gpu_microseconds(run: Callable[[], Any], replays: int = 10, launches: int | None = None) -> float:
    """Microseconds of GPU time of one run inside a captured graph of many, the median of some replays.

    By default of so many launches that launching the graph itself hardly counts.
    """
    return gpu_microseconds_each({"run": run}, replays, launches)["run"]


def gpu_microseconds_each(
    runs: Mapping[str, Callable[[], Any]], replays: int = 10, launches: int | None = None
) -> dict[str, float]:
    """The same of several runs, whose graphs are replayed in turn, each round in another order.

    A chip that gets slower is slower for all, and what a graph leaves of its clock does not always meet the same one.
    """
    graphs = {
        name: (capture(run, count)[0], count) for name, run in runs.items() for count in [launches or fitting(run)]
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    orders = random.Random(0)
    for _ in range(replays + 1):  # the first replay also uploads the graph
        for name in orders.sample([*graphs], len(graphs)):
            graph, count = graphs[name]
            times[name].append(_replay_microseconds(graph) / count)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def fitting(run: Callable[[], Any]) -> int:
    """How many launches of a run make for some milliseconds."""
    graph, _ = capture(run)
    estimate = statistics.median(_replay_microseconds(graph) for _ in range(3))
    return max(10, min(200, round(5e3 / estimate)))


def _replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


# Memory


def collect() -> None:
    """Give back what is no longer used, so that the free memory says what is held."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def grow_cache() -> None:
    """Give torch's allocator enough memory ahead that no timed call has to ask the driver for some."""
    torch.empty(CACHE, dtype=torch.uint8, device="cuda")  # freed at once, and kept by the allocator


def free_gib() -> float:
    """GiB of the device that nobody holds."""
    return torch.cuda.mem_get_info()[0] / 2**30


# Correctness


def distance(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Relative L2, the worst of all pairs; infinite where something is not finite."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        value = ((a.float() - b.float()).norm() / b.float().norm()).item()
        worst = max(worst, value if math.isfinite(value) else math.inf)
    return worst


def check(error: float, eager_error: float) -> None:
    """Whether a result may be timed: about as close to float32 as the original's own run in this dtype.

    Raises:
        WrongResultError: It is not.
    """
    allowed = min(max(1.5 * eager_error, 1e-3), LARGEST_ERROR)
    if not error <= allowed:
        raise WrongResultError(
            f"relative L2 to float32 is {error:.2e}, that of the original {eager_error:.2e}, allowed {allowed:.2e}: "
            "not timed"
        )


def time_kernels(
    systems: Mapping[str, Callable[[], Callable[[], Any]]], expected: Sequence[Tensor], eager_error: float
) -> dict[str, Any]:
    """Check and time what each system gives, in turn.

    Returns:
        `{name}_error` and `{name}_us` of each, or `{name}_failed` with the reason.
    """
    prepared = {name: _checked(prepare, expected, eager_error) for name, prepare in systems.items()}
    runs = {name: run for name, (run, _) in prepared.items() if run is not None}
    row: dict[str, Any] = {
        f"{name}_{'failed' if run is None else 'error'}": result for name, (run, result) in prepared.items()
    }
    return row | {f"{name}_us": time for name, time in gpu_microseconds_each(runs).items()}


def _checked(
    prepare: Callable[[], Callable[[], Any]], expected: Sequence[Tensor], eager_error: float
) -> tuple[Callable[[], Any] | None, Any]:
    """What to time and how far it is off, or nothing and why."""
    try:
        run = prepare()
        output = run()
        error = distance([output] if isinstance(output, Tensor) else output, expected)
        check(error, eager_error)
        capture(run)
    except Exception as failure:
        return None, reason(failure)
    return run, error


def failures(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What failed in rows of `time_kernels`, each reason once."""
    lines = (f"{key}: {value}" for row in rows for key, value in row.items() if key.endswith("_failed"))
    return list(dict.fromkeys(lines))


def reason(error: BaseException) -> str:
    """Why a row failed, in one short line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]


# Tables and JSON


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, its columns aligned for the terminal: numbers get two decimals, `None` is a dash."""
    lines = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    rule = ["-" * width for width in widths]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def read_csv(path: Path, kind: Callable[..., Line]) -> list[Line]:
    """The lines of a CSV file, as named tuples of a kind."""
    with path.open(newline="") as file:
        return [kind(**line) for line in csv.DictReader(file)]


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *lines])
    return text.getvalue()


def report(rows: Iterable[dict[str, Any]], header: Sequence[str], path: Path | None) -> None:
    """Print rows of bfloat16 results, and write them as JSON, as they come; then print their columns as a table."""
    about = facts()
    print(f"{headline(about)}, bfloat16\n")
    result: dict[str, Any] = {**about, "dtype": "bfloat16", "rows": []}
    for row in rows:
        result["rows"].append(row)
        write_json(path, result)
        print(row, flush=True)
    print(table(header, [[row.get(key) for key in header] for row in result["rows"]]))


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result, lists of numbers on one line each. Called after every row, so that a run cut short keeps them."""
    if path is None:
        return
    text = json.dumps(_rounded(result), indent=1)
    text = re.sub(r"\[[\d\s.,e+-]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value
