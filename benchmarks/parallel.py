"""Wall milliseconds of calls that several GPUs share: the Qwen3-VL-8B vision tower, bfloat16, random weights.

Run as `torchrun --nproc-per-node 4 -m benchmarks.parallel`. Correctness comes first: an output that is not about as
close to a float32 copy of the tower as the tower's own is not timed. All rows are on every GPU. Calls begin together,
and the wall is that of the slowest rank. JSON is written after every row.

Systems:
- one: `vg.recipes.qwen3_vl(tower)` on one GPU, with the default ladder, while the others are idle.
- one_eager: the tower as transformers runs it on one GPU, on FlashAttention 2.
- parallel: `vg.parallel.DataParallelEncoder` of the first.
- parallel_eager: the same of the second: the items are spread and gathered in the same way.
- gather: the first spread over all ranks, less the encoding, of which the outputs are kept: what the ranks tell each
  other, and what they do to put it in order.
- tensor: `vg.parallel.TensorParallelEncoder` of the tower sharded over all ranks, by `vg.parallel.tensor_plan`.
"""

import argparse
import copy
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import (
    check,
    distance,
    facts,
    grow_cache,
    headline,
    measure,
    percentile,
    reason,
    summary,
    table,
    write_json,
)
from benchmarks.traces import Layout, image, rows_of

INPUTS: dict[str, Layout] = {
    "8 of 448x448": (image(448),) * 8,
    "32 of 448x448": (image(448),) * 32,
    "4 videos of 8 frames of 224x224": ((4, 14, 14),) * 4,  # two frames are one patch
    "1 of 448x448": (image(448),),
    "896x896 and three of 192x192": (image(192), image(896), image(192), image(192)),
}
"""The last two cannot be spread evenly: one item, and sizes of 20 to 1."""

SYSTEMS = ("one", "one_eager", "parallel", "parallel_eager", "gather", "tensor")

ALONE = ("one", "one_eager")
"""What one rank runs while the others are idle."""

AT_LEAST = {2: 1.75, 4: 3.2}
"""What is asked of 32 images: how many times as fast as one GPU, by the number of GPUs."""


class Gather(vg.parallel.DataParallelEncoder):
    """Encodes each part of a call once, and keeps its outputs."""

    def __init__(self, encoder: vg.GraphedEncoder) -> None:
        super().__init__(encoder)
        self._kept: dict[vg.layouts.Layout, Any] = {}

    def _encode(self, call: Any, rows: Tensor, part: vg.layouts.Layout) -> Any:
        if not self._forms:  # a first run, over rows of padding
            return super()._encode(call, rows, part)
        if part not in self._kept:
            self._kept[part] = super()._encode(call, rows, part)
        return self._kept[part]


def main() -> None:
    """Run the benchmark on this rank; the first one prints it, and writes it as JSON."""
    options = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tower = ways.make_tower(options.size, torch.bfloat16)  # the same weights on every rank
    exact = copy.deepcopy(tower).float()
    systems = make_systems(tower, options.systems)
    result: dict[str, Any] = {**facts(), "ranks": ranks, "tower": options.size, "dtype": "bfloat16", "rows": []}
    if rank == 0:
        print(f"{ranks} of {headline(result)}, {options.size} tower, bfloat16\n")
    for name in options.only:
        torch.manual_seed(0)
        call = ways.make_call(INPUTS[name])
        with torch.no_grad():
            expected = ways.tensors(exact(call.rows.float(), grid_thw=call.grid))
        with ways.attention(tower, ways.FLASH2):
            eager_error = distance(ways.tensors(ways.run_eager(tower, call)), expected)
            for system in options.systems:
                run = partial(systems[system], call.rows, grid_thw=torch.tensor(call.layout))
                row = {"system": system, "input": name, "input_rows": rows_of(call.layout)}
                row |= time_system(run, system in ALONE, expected, eager_error, options.repeats)
                result["rows"].append(row)
                if rank == 0:
                    write_json(options.json, result)
                    print(line(row), flush=True)
    if rank == 0:
        print(f"\n{report(result)}")
    if "tensor" in systems:
        systems["tensor"].encoder.release()  # NCCL waits for graphs that hold its collectives
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=ways.TOWERS, default="8b")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM")
    parser.add_argument(
        "--only", nargs="+", choices=INPUTS, default=list(INPUTS), metavar="INPUT", help="; ".join(INPUTS)
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed calls (20)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_systems(tower: Any, names: Sequence[str]) -> dict[str, Any]:
    """What runs a call, by the name of the system."""
    sharded = {}
    if "tensor" in names:
        ours = copy.deepcopy(tower)
        parallelize_module(ours, init_device_mesh("cuda", (dist.get_world_size(),)), vg.parallel.tensor_plan(ours))
        sharded["tensor"] = vg.parallel.TensorParallelEncoder(vg.recipes.qwen3_vl(ours)).capture()
    graphed = vg.recipes.qwen3_vl(tower).capture()
    merged = vg.outputs.Rows(every=4)
    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=merged, deepstack_features=merged)
    spec = vg.BufferSpec("hidden_states", vg.GridTHW("grid_thw", merge=2), outputs=outputs)
    eager = vg.GraphedEncoder(tower, [64], spec, backend="eager")  # whose eager calls are the tower's own
    return {
        "one": graphed,
        "one_eager": eager,
        "parallel": vg.parallel.DataParallelEncoder(graphed),
        "parallel_eager": vg.parallel.DataParallelEncoder(eager),
        "gather": Gather(graphed),
        **sharded,
    }


def time_system(
    run: Callable[[], Any], alone: bool, expected: list[Tensor], eager_error: float, repeats: int
) -> dict[str, Any]:
    """Check and time a system on one input, on all ranks at once, or on the first one while the others wait.

    What fails on one rank leaves the others waiting, so a failure ends the benchmark, except for a wrong result: all
    ranks have the same one.
    """
    grow_cache()
    walls: list[float] = []
    hosts: list[float] = []
    row: dict[str, Any] = {}
    if not alone or dist.get_rank() == 0:
        error = distance(ways.tensors(run()), expected)
        row = {"error": error, "eager_error": eager_error}
        try:
            check(error, eager_error)
        except Exception as failure:
            row["failed"] = reason(failure)
        run()
        walls, hosts = measure(run, repeats, math.inf, None if alone else dist.barrier)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, walls)
    slowest = [max(each) for each in zip(*filter(None, told), strict=True)]
    if "failed" in row or not hosts:
        return row
    return row | summary(slowest, hosts) | {"wall_ms": slowest}


def line(row: dict[str, Any]) -> str:
    """A row as it is printed when it comes."""
    start = f"{row['system']:<16}{row['input']:<34}"
    if "failed" in row:
        return f"{start}failed: {row['failed']}"
    return (
        f"{start}p50 {row['p50_ms']:7.2f}  p99 {row['p99_ms']:7.2f}  host {row['host_ms']:7.3f}  error "
        f"{row['error']:.2e} (eager {row['eager_error']:.2e})"
    )


def report(result: dict[str, Any]) -> str:
    """Median walls of all systems, and how many times as fast as one GPU they are."""
    rows = {(row["system"], row["input"]): row for row in result["rows"] if "wall_ms" in row}

    def median(system: str, name: str) -> float | None:
        return percentile(rows[system, name]["wall_ms"], 0.5) if (system, name) in rows else None

    def ratio(name: str, slower: str, system: str = "parallel") -> float | None:
        ours, other = median(system, name), median(slower, name)
        return other / ours if ours and other else None

    lines = []
    for name in INPUTS:
        asked = AT_LEAST.get(result["ranks"]) if name == "32 of 448x448" else None
        ratios = [ratio(name, slower) for slower in ("one", "parallel_eager")]
        tensor = ratio(name, "one", "tensor")
        lines.append((name, *(median(system, name) for system in SYSTEMS), ratios[0], asked, ratios[1], tensor))
    heads = ("one / parallel", "asked", "parallel_eager / parallel", "one / tensor")
    return table(("ms, median", *SYSTEMS, *heads), lines)


if __name__ == "__main__":
    main()
