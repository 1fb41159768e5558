"""Host time of a call: from the call to its return, for images never seen before, whatever was seen before.

A tower of the depth and outputs of Qwen3-VL-8B's (351 weights) but small, so that the GPU is never what is waited for.
Correctness first: the output equals the same call run eager. *CUDA alone* is what no encoder in Python can do without:
the copy of the rows, that of the item table with its event, the launch of the graph, and one launch that copies the
outputs, with nothing looked up, checked or planned. On a machine without a GPU the tape stands in, with graphs
whose replay does nothing: the time of everything but CUDA.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import varlen_graphs as vg
from benchmarks.common import write_json

IMAGES = 8
SIZES = {
    "depth": 27, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip


def bare(encoder: Any) -> Callable[[torch.Tensor, Any], Any]:
    """The calls into CUDA of one replay, everything ready."""
    (graphs,), budget = encoder.executor.store.sets, encoder.budgets[-1]
    graph, arena = graphs[budget], graphs.arena
    block = torch.empty(len(arena.items), dtype=torch.int64, pin_memory=True)
    block.copy_(arena.items)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()

    def call(rows: torch.Tensor, grid_thw: Any) -> Any:
        arena.rows[: len(rows)].copy_(rows, non_blocking=True)
        arena.items.copy_(block, non_blocking=True)
        event.record(stream)
        graph.replay()
        return torch._foreach_mul([output[:40] for output in graph.outputs], 1)

    return call


def outputs_alone(graphs: Any, budget: Any) -> Any:
    """A replay that takes no time."""
    return graphs[budget].outputs


def time_calls(encoder: Any, calls: list[tuple[torch.Tensor, Any]], device: str) -> list[float]:
    """Microseconds until each call returns; the device is idle at its begin."""
    times = []
    for rows, grid in calls:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        encoder(rows, grid_thw=grid)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def guards(encoder: Any) -> float:
    """Microseconds a call takes to look whether what its graph reads is where it was, and the process the same."""
    guard, pool, number = encoder.executor.store.capturer.dependencies.guard, encoder.pool, 2000

    def look() -> None:
        guard.find_change_sampled()
        pool.check_process()  # at the begin of a call, and at the pool's turn
        pool.check_process()

    return min(timeit.repeat(look, number=number, repeat=5)) / number * 1e6


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tower = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**SIZES), dtype=dtype).eval().to(device)
    tower.requires_grad_(False)
    budgets = [vg.Budget(rows, items=2 * IMAGES, segments=rows // 4) for rows in (128, 256, 384, 512)]
    options = {"backend": "cuda" if device == "cuda" else "tape"}
    encoder = vg.recipes.qwen3_vl(tower, budgets, **options).capture()
    lender = vg.recipes.qwen3_vl(tower, budgets, outputs="borrowed", **options).capture()

    generator = torch.Generator().manual_seed(0)
    sides = 2 * torch.randint(1, 4, (args.calls, IMAGES, 2), generator=generator)
    grids = [[(1, h, w) for h, w in sides_of_call] for sides_of_call in sides.tolist()]
    width = tower.patch_embed.proj.weight[0].numel()
    rows = torch.randn(512, width, device=device, dtype=dtype)
    every = [rows[: sum(t * h * w for t, h, w in grid)] for grid in grids]
    error = max(
        (encoder(r, grid_thw=g).pooler_output - encoder.eager(r, grid_thw=g).pooler_output).abs().max().item()
        for r, g in zip(every[:20], grids[:20], strict=True)
    )
    assert error < (0.1 if device == "cuda" else 1e-4), f"graphs and eager differ by {error}"  # noqa: S101
    if device == "cpu":
        for one in (encoder, lender):
            for graphs in one.executor.store.sets:
                graphs.replay = partial(outputs_alone, graphs)

    cases = {
        "list": (encoder, grids),
        "tensor on the CPU" if device == "cuda" else "tensor": (encoder, list(map(torch.tensor, grids))),
        "list, borrowed outputs": (lender, grids),
    }
    if device == "cuda":
        cases["tensor on the GPU"] = (encoder, [torch.tensor(grid, device="cuda") for grid in grids])
        cases["CUDA alone"] = (bare(encoder), grids)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, replays of nothing"
    result = {"device": name, "torch": torch.__version__, "calls": args.calls, "rows": []}
    print(f"{name}, torch {torch.__version__}, {len(list(tower.parameters()))} weights, {args.calls} calls")
    print(f"{'layout':28s} {'median':>8s} {'P90':>8s} {'P99':>8s}   first half / second half, us")
    for case, (one, layouts) in cases.items():
        calls = list(zip(every, layouts, strict=True))
        time_calls(one, calls[:50], device)
        times = time_calls(one, calls, device)
        cuts = statistics.quantiles(times, n=100)
        halves = [statistics.median(half) for half in (times[: len(times) // 2], times[len(times) // 2 :])]
        figures = {"median_us": cuts[49], "p90_us": cuts[89], "p99_us": cuts[98], "halves_us": halves}
        result["rows"].append({"layout": case, **figures})
        print(f"{case:28s} {cuts[49]:8.0f} {cuts[89]:8.0f} {cuts[98]:8.0f}   {halves[0]:.0f} / {halves[1]:.0f}")
    result["guards_us"] = guards(encoder)
    print(f"{'of that, guards':28s} {result['guards_us']:8.1f}")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
