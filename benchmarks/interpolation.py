"""GPU microseconds of resampling position embeddings and adding them to the rows of a budget.

The kernel does both in one launch. It is compared with plain torch operations (the reference, and the sum) inside a
graph too, and with `torch.nn.functional.interpolate` item by item, eager, as towers did it. Nothing is timed unless the
kernel equals the reference, and is within 2e-5 of torch's own interpolation in float64.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import facts, gpu_microseconds_each, headline, table, write_json
from varlen_graphs.kernels.interpolation import reference
from varlen_graphs.kernels.interpolation.op import interpolate

BUDGETS = (256, 1024, 4096, 8192, 16_384)
SIDE, DIM, MERGE = 48, 1152, 2
DTYPE = torch.bfloat16
WAYS = (("bilinear", True), ("bicubic", False))
"""As Qwen3-VL and as GLM-4.1V resample."""


def make_items(rows: int) -> list[tuple[int, int]]:
    """Heights and widths of images that fill 7/8 of a budget."""
    sides, items = [(8, 8), (16, 12), (8, 24), (32, 32), (14, 14)], []
    for index in range(max(8, rows // 64)):
        height, width = sides[index % len(sides)]
        if sum(h * w for h, w in items) + height * width <= rows * 7 // 8:
            items.append((height, width))
    return items


def by_item(entries: Tensor, items: list[tuple[int, int]], mode: str, align_corners: bool) -> Tensor:
    """One `F.interpolate` an image, with the rows of each merge block side by side."""
    image = entries.T.reshape(1, -1, SIDE, SIDE)
    resampled = []
    for h, w in items:
        grid = F.interpolate(image, (h, w), mode=mode, align_corners=align_corners)[0].permute(1, 2, 0)
        blocks = grid.reshape(h // MERGE, MERGE, w // MERGE, MERGE, -1).transpose(1, 2)
        resampled.append(blocks.reshape(h * w, -1))
    return torch.cat(resampled)


def check(rows: int, values: Tensor, items: list[tuple[int, int]], mode: str, align_corners: bool) -> float:
    """The largest error of the kernel in float32, after a comparison with the reference in all dtypes."""
    entries, add = torch.randn(SIDE * SIDE, DIM, device="cuda"), torch.randn(rows, DIM, device="cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for accum_dtype in {torch.float32, dtype}:
            arguments = (entries.to(dtype), values, rows, mode, align_corners, MERGE, accum_dtype, add.to(dtype))
            if not torch.equal(interpolate(*arguments), reference.interpolate(*arguments)):
                raise SystemExit(f"{mode}, {rows} rows, {dtype}: kernel and reference differ: not timed")
    expected = by_item(entries.double(), items, mode, align_corners)
    got = interpolate(entries, values, rows, mode, align_corners, MERGE, torch.float32)[: len(expected)]
    error = (got - expected).abs().max().item()
    if not error <= 2e-5:
        raise SystemExit(f"{mode}, {rows} rows: {error:.1e} from torch's own interpolation: not timed")
    return error


def elapsed(run: Callable[[], Any], repeats: int) -> float:
    """Mean microseconds of each `run`, eager."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "side": SIDE, "dim": DIM, "dtype": str(DTYPE), "rows": []}
    print(headline(result) + "\n")
    for rows in BUDGETS:
        items = make_items(rows)
        values = torch.zeros(max(8, rows // 64), 3, dtype=torch.int64)
        values[: len(items)] = torch.tensor([(1, *item) for item in items])
        values = values.cuda()
        entries = torch.randn(SIDE * SIDE, DIM, device="cuda").to(DTYPE)
        add = torch.randn(rows, DIM, device="cuda").to(DTYPE)
        active = add[: sum(h * w for h, w in items)]
        for mode, align_corners in WAYS:
            error = check(rows, values, items, mode, align_corners)
            arguments = (entries, values, rows, mode, align_corners, MERGE, torch.float32, add)
            eager = partial(by_item, entries, items, mode, align_corners)
            runs = {"kernel": partial(interpolate, *arguments), "torch": partial(reference.interpolate, *arguments)}
            result["rows"].append(
                {
                    "mode": mode,
                    "align_corners": align_corners,
                    "rows": rows,
                    "items": len(items),
                    **{f"{name}_us": time for name, time in gpu_microseconds_each(runs).items()},
                    "by_item_us": elapsed(lambda x=active, run=eager: x + run(), 10),
                    "error": error,
                }
            )
            write_json(options.json, result)
    header = ("mode", "rows", "items", "kernel us", "torch us", "by item, eager us", "error")
    keys = ("mode", "rows", "items", "kernel_us", "torch_us", "by_item_us")
    print(table(header, [[*(row[key] for key in keys), f"{row['error']:.1e}"] for row in result["rows"]]))


if __name__ == "__main__":
    main()
