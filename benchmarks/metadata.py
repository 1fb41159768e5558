"""GPU microseconds of what a graph computes from its item table: one kernel each, against plain torch operations.

Every figure is the mean of many replays of a captured graph that holds nothing else. Nothing is timed unless the
kernels agree with their references.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.kernels.cu_seqlens import reference as cu_seqlens_reference
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.positions import reference as positions_reference
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.rotary_table import reference as rotary_reference
from varlen_graphs.kernels.rotary_table.op import rotary_table

BUDGETS = (256, 1024, 4096, 8192, 16_384)
MERGE = 2
FREQUENCIES = 18
"""A quarter of a head of 72."""

CALLS = 20
"""Times that a graph holds what is timed, so that the gap between replays does not count."""


def make_table(rows: int) -> Tensor:
    """The item table of a budget that is 7/8 full of images of 64 to 1,024 patches."""
    table = torch.zeros(max(8, rows // 64), 3, dtype=torch.int64)
    sides, used = [(8, 8), (16, 12), (8, 24), (32, 32), (14, 14)], 0
    for item in range(len(table)):
        height, width = sides[item % len(sides)]
        if used + height * width <= rows * 7 // 8:
            table[item] = torch.tensor([1, height, width])
            used += height * width
    order = (table[:, 0] == 0).argsort(stable=True)
    return table[order].cuda()


def work(rows: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, kernel and reference of each buffer of a Qwen3-VL tower, at a budget."""
    table = make_table(rows)
    segments = table.shape[0]
    inv_freq = 10_000.0 ** -(torch.arange(FREQUENCIES, device="cuda") / FREQUENCIES)
    rotary = (table, rows, inv_freq, "h w", MERGE)
    yield "rotary", lambda: rotary_table(*rotary), lambda: rotary_reference.rotary_table(*rotary)
    starts = (table, segments, True)
    yield "cu_seqlens", lambda: (cu_seqlens(*starts),), lambda: (cu_seqlens_reference.cu_seqlens(*starts),)


def extra_work(rows: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """The same for what that tower does not need, so that it counts for no total."""
    at = (make_table(rows), rows, "h w", MERGE)
    yield "positions", lambda: (positions(*at),), lambda: (positions_reference.positions(*at),)


def measure(run: Callable[[], Any], replays: int) -> float:
    """Mean GPU microseconds of `run` inside a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    for _ in range(5):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (replays * CALLS)


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{'rows':>6}{'items':>7}  {'buffer':<12}{'kernel us':>10}{'torch us':>10}")
    for rows in BUDGETS:
        items = make_table(rows).shape[0]
        totals = {"kernel_us": 0.0, "torch_us": 0.0}
        for counts, source in ((True, work), (False, extra_work)):
            for name, kernel, reference in source(rows):
                for got, expected in zip(kernel(), reference(), strict=True):
                    torch.testing.assert_close(got, expected, rtol=0, atol=2.4e-7)
                times = {
                    "kernel_us": measure(kernel, options.replays),
                    "torch_us": measure(reference, options.replays),
                }
                results.append({"rows": rows, "items": items, "buffer": name, **times})
                print(f"{rows:>6}{items:>7}  {name:<12}{times['kernel_us']:>10.2f}{times['torch_us']:>10.2f}")
                if counts:
                    totals = {key: totals[key] + value for key, value in times.items()}
            if counts:
                results.append({"rows": rows, "items": items, "buffer": "total", **totals})
                print(f"{rows:>6}{items:>7}  {'total':<12}{totals['kernel_us']:>10.2f}{totals['torch_us']:>10.2f}")
    if options.json:
        facts = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "replays": options.replays, "results": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
