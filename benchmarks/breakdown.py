"""Where the GPU time of a graphed call goes, by kind of kernel.

Run with `make bench-kernels`. The tower of Qwen3-VL-8B in bfloat16, inputs of the tower's benchmark. Every kernel of a
call is seen by torch's profiler, and figures are the median of some calls; the wall of a call is timed without it. What
the wall has more than all kernels is the host ahead of the launch, and the gaps between kernels.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import check, collector_off, distance, facts, headline, measure, table, write_json
from benchmarks.systems import Call
from benchmarks.traces import SINGLES, Layout, trace

INPUTS: dict[str, Layout] = {
    **{name: SINGLES[name] for name in ("224x224", "672x672", "1344x1344")},
    "video": trace("video", 1)[0],
    "burst": trace("burst", 1)[0],
}
"""A layout each."""

KINDS = {
    "attention": ("attention",),
    "rotation of queries and keys": ("_rotary",),
    "layer norms, with the sums before them": ("_add_layer_norm", "layer_norm"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk"),
    "buffers and checks": ("_schedule", "rotary_table", "cu_seqlens", "interpolate", "positions", "_check"),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
}
"""Kinds of kernels by parts of their names, in lower case; the first that matches counts."""

OTHERS, KERNELS, WALL = "all others", "all kernels", "wall of the call"


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    about = facts()
    print(f"{headline(about)}, bfloat16, 8b tower\n")
    tower = ways.make_tower("8b", torch.bfloat16)
    calls = {name: ways.make_call(layout) for name, layout in INPUTS.items()}
    encoder = vg.recipes.qwen3_vl(
        tower,
        sorted({budget_rows(call) for call in calls.values()}),
        layouts=vg.options.GpuLayouts(min_segment_rows=64),
    )
    result: dict[str, Any] = {**about, "dtype": "bfloat16", "tower": "8b", "rows": []}
    for name, call in calls.items():
        with ways.attention(tower, ways.FLASH2):
            expected = ways.tensors(ways.run_eager(tower, call))
        check(distance(ways.tensors(encoder(call.rows, grid_thw=call.grid)), expected), 2e-2)
        result["rows"] += [{"input": name, "rows": len(call.rows), **row} for row in breakdown(encoder, call, options)]
        write_json(options.json, result)
    lines = [(row["input"], row["kind"], row["launches"], row["gpu_us"]) for row in result["rows"]]
    print(table(("input", "what", "launches", "us"), lines))


def budget_rows(call: Call) -> int:
    """The budget that the default ladder has for a call."""
    return next(rows for rows in vg.Ladder().row_counts() if rows >= len(call.rows))


def breakdown(encoder: vg.GraphedEncoder, call: Call, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Launches and microseconds of each kind of kernel and of all together, and the wall of a call."""
    kinds: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = {}
    with collector_off():
        for _ in range(options.calls):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                encoder(call.rows, grid_thw=call.grid)
                torch.cuda.synchronize()
            times: dict[str, list[float]] = defaultdict(list)
            kernels = [event for event in seen.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
            for event in kernels:
                times[kind(event.name)].append(event.time_range.elapsed_us())
            for name, each in times.items():
                kinds[name].append(sum(each))
                counts[name] = len(each)
            kinds[KERNELS].append(sum(map(sum, times.values())))
    counts[KERNELS] = sum(counts.values())
    kinds[WALL] = [1e3 * wall for wall in measure(lambda: encoder(call.rows, grid_thw=call.grid), 20, seconds=2)[0]]
    order = [*KINDS, OTHERS, KERNELS, WALL]
    return [
        {"kind": name, "launches": counts.get(name), "gpu_us": statistics.median(kinds[name])}
        for name in order
        if name in kinds
    ]


def kind(name: str) -> str:
    """What a kernel is for."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), OTHERS)


if __name__ == "__main__":
    main()
