"""Seconds of the first calls of the tower of Qwen3-VL in a process, with a cold and a warm cache of Triton.

Run with `python -m benchmarks.first_call`. Each row is a process of its own, with the default ladder and the proof:
making the encoder; at once the first call, one image of 448 x 448; then new calls of the trace `mix4`, of which those
that need a new graph capture it; and the same calls again. Afterwards all outputs are compared with eager ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import varlen_graphs as vg
from benchmarks.common import check, distance, facts, headline, table, write_json
from benchmarks.systems import ROW, make_tower, tensors
from benchmarks.traces import SINGLES, Layout, trace

CALLS = 32
"""Calls of the trace."""

BETWEEN = 1e-2
"""Relative L2 between two right outputs in bfloat16, which other kernels and tiles make different."""


def rows_for(layout: Layout) -> torch.Tensor:
    """Random patches of a call."""
    count = sum(t * h * w for t, h, w in layout)
    return torch.randn(count, ROW, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)


def measure(size: str) -> dict[str, Any]:
    """The seconds of a process's calls."""
    layouts = [SINGLES["448x448"], *trace("mix4", CALLS)]
    rows = [rows_for(layout) for layout in layouts]
    tower = make_tower(size, torch.bfloat16)
    tower(rows[0], grid_thw=torch.tensor(layouts[0], device="cuda"))  # CUDA and cuBLAS start
    start = time.perf_counter()
    encoder = vg.recipes.qwen3_vl(tower)
    made = time.perf_counter() - start

    def seconds(at: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        encoder(rows[at], grid_thw=layouts[at])
        torch.cuda.synchronize()
        return time.perf_counter() - start

    first = seconds(0)
    parts = dict(encoder.executor.store.seconds)
    new = [seconds(at) for at in range(1, len(layouts))]
    graphs = len(encoder.executor.store)
    again = [seconds(at) for at in range(1, len(layouts))]
    for part, layout in zip(rows, layouts, strict=True):
        ours, eager = (tensors(run(part, grid_thw=layout)) for run in (encoder, encoder.eager))
        check(distance(ours, eager), BETWEEN)
    assert not encoder.stats.eager, encoder.stats.eager  # noqa: S101
    return {
        "made_s": made, "first_s": first, "parts_s": parts, "calls": CALLS, "graphs": graphs, "longest_s": max(new),
        "new_s": sum(new), "again_s": sum(again), "median_again_s": statistics.median(again), "every_s": new,
    }  # fmt: skip


def main() -> None:
    """Run each process, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["2b", "8b"], default="8b")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        print(json.dumps(measure(options.size)))
        return
    result: dict[str, Any] = {**facts(), "size": options.size, "rows": []}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm", "warm", "warm"):
            command = [sys.executable, "-m", "benchmarks.first_call", "--own", "--size", options.size]
            run = subprocess.run(
                command, env=os.environ | {"TRITON_CACHE_DIR": cache}, capture_output=True, check=False
            )
            if run.returncode:
                raise RuntimeError(run.stderr.decode())
            result["rows"].append({"cache": name, **json.loads(run.stdout.decode().splitlines()[-1])})
            write_json(options.json, result)
    print(headline(result))
    header = ("cache", "made_s", "first_s", "calls", "graphs", "longest_s", "new_s", "again_s")
    print(table(header, [[row[key] for key in header] for row in result["rows"]]))


if __name__ == "__main__":
    main()
