"""GPU microseconds of what a graph computes from its item table: one kernel each, against plain torch operations.

Every figure is the median of replays of a captured graph that holds nothing else. Nothing is timed unless the kernels
agree with their references. The total is what a tower like Qwen3-VL's computes, the check of the table included.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import facts, gpu_microseconds_each, headline, table, write_json
from varlen_graphs.attention.hopper.config import long_keys
from varlen_graphs.attention.kernel.config import tile_rows
from varlen_graphs.attention.tile_schedule import reference as schedule_reference
from varlen_graphs.attention.tile_schedule.op import tile_schedule
from varlen_graphs.kernels.check.op import check_items
from varlen_graphs.kernels.cu_seqlens import reference as cu_seqlens_reference
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.positions import reference as positions_reference
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.rotary_table import reference as rotary_reference
from varlen_graphs.kernels.rotary_table.op import rotary_table

BUDGETS = (256, 1024, 4096, 8192, 16_384)
MERGE = 2
HEADS, HEAD_DIM = 16, 72

Tensors = Callable[[], tuple[Tensor, ...]]


def make_items(rows: int, device: str) -> Tensor:
    """The item table of a budget that is 7/8 full of images of 64 to 1,024 patches."""
    items = torch.zeros(max(8, rows // 64), 3, dtype=torch.int64)
    sides, used = [(8, 8), (16, 12), (8, 24), (32, 32), (14, 14)], 0
    for item in range(len(items)):
        height, width = sides[item % len(sides)]
        if used + height * width <= rows * 7 // 8:
            items[item] = torch.tensor([1, height, width])
            used += height * width
    order = (items[:, 0] == 0).argsort(stable=True)
    return items[order].to(device)


def work(rows: int, device: str = "cuda") -> Iterator[tuple[str, Tensors, Tensors | None]]:
    """Name, kernel and reference of each buffer of a tower at a budget; that of the check would need the host."""
    items = make_items(rows, device)
    segments = len(items)
    inv_freq = 10_000.0 ** -(torch.arange(HEAD_DIM // 4, device=device) / (HEAD_DIM // 4))
    rotary = (items, rows, inv_freq, "h w", MERGE)
    yield "rotary table", lambda: rotary_table(*rotary), lambda: rotary_reference.rotary_table(*rotary)
    starts = (items, segments, True)
    yield "cu_seqlens", lambda: (cu_seqlens(*starts),), lambda: (cu_seqlens_reference.cu_seqlens(*starts),)
    boundaries = cu_seqlens(*starts)
    tiles = (boundaries, boundaries, rows, tile_rows(HEAD_DIM, HEADS, rows, rows), long_keys(HEAD_DIM))
    count = 1 + int(schedule_reference.tile_schedule(*tiles)[0, 0])  # entries past these are arbitrary
    yield (
        "tile schedule",
        lambda: (tile_schedule(*tiles)[:count],),
        lambda: (schedule_reference.tile_schedule(*tiles)[:count],),
    )
    header = torch.tensor([1, int((items[:, 0] > 0).sum()), int(items.prod(1).sum()), 1, 0], device=device)
    padding, found = items.new_zeros(3), (items.new_zeros(5), torch.zeros((), device=device))
    limits = (1, MERGE, MERGE**2, segments, rows, True, False, 0)

    def check() -> tuple[Tensor, ...]:
        check_items(header, items, padding, *found, *limits)
        return found

    yield "check", check, None


def extra_work(rows: int, device: str = "cuda") -> Iterator[tuple[str, Tensors, Tensors | None]]:
    """The same for what that tower does not need, so that it counts for no total."""
    at = (make_items(rows, device), rows, "h w", MERGE)
    yield "positions", lambda: (positions(*at),), lambda: (positions_reference.positions(*at),)


def check_one(kernel: Tensors, reference: Tensors | None) -> None:
    """Hold a kernel against its reference; the check of the table finds nothing wrong."""
    expected = reference() if reference else (torch.zeros(5, dtype=torch.int64), torch.tensor(-0.0))
    for got, right in zip(kernel(), expected, strict=True):
        torch.testing.assert_close(got, right.to(got.device), rtol=0, atol=2.4e-7)


def time_one(kernel: Tensors, reference: Tensors | None) -> dict[str, float | None]:
    """Check a kernel, and time it and its reference."""
    check_one(kernel, reference)
    times = gpu_microseconds_each({"kernel": kernel, **({"torch": reference} if reference else {})})
    return {"kernel_us": times["kernel"], "torch_us": times.get("torch")}


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "rows": []}
    print(headline(result) + "\n")
    for rows in BUDGETS:
        items, total = len(make_items(rows, "cpu")), 0.0
        for name, kernel, reference in work(rows):
            times = time_one(kernel, reference)
            total += times["kernel_us"] or 0.0
            result["rows"].append({"rows": rows, "items": items, "buffer": name, **times})
        result["rows"].append({"rows": rows, "items": items, "buffer": "total", "kernel_us": total, "torch_us": None})
        for name, kernel, reference in extra_work(rows):
            result["rows"].append({"rows": rows, "items": items, "buffer": name, **time_one(kernel, reference)})
        write_json(options.json, result)
    header = ("buffer", "rows", "items", "kernel us", "torch us")
    keys = ("buffer", "rows", "items", "kernel_us", "torch_us")
    print(table(header, [[row[key] for key in keys] for row in result["rows"]]))


if __name__ == "__main__":
    main()
