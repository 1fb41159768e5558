"""GPU microseconds of resampling position embeddings and adding them to the rows of a budget.

The kernel does both in one launch. It is compared with plain torch operations (the reference, and the sum) inside a
graph too, and with `torch.nn.functional.interpolate` item by item, eager, as towers did it. Nothing is timed unless the
kernel equals the reference, and is within 2e-5 of torch's own interpolation in float64.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varlen_graphs.kernels.interpolation import reference
from varlen_graphs.kernels.interpolation.op import interpolate

BUDGETS = (256, 1024, 4096, 8192, 16_384)
SIDE, DIM, MERGE = 48, 1152, 2
DTYPE = torch.bfloat16
WAYS = (("bilinear", True), ("bicubic", False))
"""As Qwen3-VL and as GLM-4.1V resample."""

CALLS = 10
"""Times that a graph holds what is timed, so that the gap between replays does not count."""


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


def check(rows: int, table: Tensor, items: list[tuple[int, int]], mode: str, align_corners: bool) -> float:
    """The largest error of the kernel in float32, after a comparison with the reference in all dtypes."""
    entries, add = torch.randn(SIDE * SIDE, DIM, device="cuda"), torch.randn(rows, DIM, device="cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for accum_dtype in {torch.float32, dtype}:
            arguments = (entries.to(dtype), table, rows, mode, align_corners, MERGE, accum_dtype, add.to(dtype))
            if not torch.equal(interpolate(*arguments), reference.interpolate(*arguments)):
                raise SystemExit(f"{mode}, {rows} rows, {dtype}: kernel and reference differ: not timed")
    expected = by_item(entries.double(), items, mode, align_corners)
    got = interpolate(entries, table, rows, mode, align_corners, MERGE, torch.float32)[: len(expected)]
    error = (got - expected).abs().max().item()
    if not error <= 2e-5:
        raise SystemExit(f"{mode}, {rows} rows: {error:.1e} from torch's own interpolation: not timed")
    return error


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
    return elapsed(graph.replay, replays) / CALLS


def elapsed(run: Callable[[], Any], repeats: int) -> float:
    """Mean microseconds between events around each `run`."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{'rows':>6}  {'mode':<10}{'kernel us':>10}{'torch us':>10}{'by item, eager us':>19}{'error':>10}")
    for rows in BUDGETS:
        items = make_items(rows)
        table = torch.zeros(max(8, rows // 64), 3, dtype=torch.int64)
        table[: len(items)] = torch.tensor([(1, *item) for item in items])
        table = table.cuda()
        entries = torch.randn(SIDE * SIDE, DIM, device="cuda").to(DTYPE)
        add = torch.randn(rows, DIM, device="cuda").to(DTYPE)
        active = add[: sum(h * w for h, w in items)]
        for mode, align_corners in WAYS:
            error = check(rows, table, items, mode, align_corners)
            arguments = (entries, table, rows, mode, align_corners, MERGE, torch.float32, add)
            result = {
                "rows": rows, "items": len(items), "mode": mode, "align_corners": align_corners, "error": error,
                "kernel_us": measure(lambda a=arguments: interpolate(*a), options.replays),
                "torch_us": measure(lambda a=arguments: reference.interpolate(*a), options.replays),
                "by_item_us": elapsed(
                    lambda e=entries, i=items, m=mode, c=align_corners, x=active: x + by_item(e, i, m, c), 10
                ),
            }  # fmt: skip
            results.append(result)
            print(
                f"{rows:>6}  {mode:<10}{result['kernel_us']:>10.2f}{result['torch_us']:>10.2f}"
                f"{result['by_item_us']:>19.2f}{error:>10.1e}"
            )
    if options.json:
        facts = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "side": SIDE, "dim": DIM, "dtype": str(DTYPE), "replays": options.replays, "results": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
