"""Host time of a call: from the call to its return, for items never seen before, whatever was seen before.

Images: a tower of the depth and outputs of Qwen3-VL-8B's (351 weights) but small, so that the GPU is never what is
waited for. Correctness first: the output equals the same call run eager. *CUDA alone* is what no encoder in Python can
do without: the copy of the item table with its event, the launch of the graph, which copies the rows, and one launch
that copies the outputs, with nothing looked up, checked or planned. Texts: padded batches of 8 for a small BERT of 12
layers; with the mask on the GPU, the host waits for a copy of it. The cases take turns, because a host may be slow for
a while. On a machine without a GPU the tape stands in, with graphs whose replay does nothing: the time of everything
but CUDA. *Shares* are those of the packages of this library, of torch and of all else in the time of calls under a
profiler, which makes small Python functions look slower than they are.
"""

import argparse
import cProfile
import pstats
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import varlen_graphs as vg
from benchmarks.common import write_json
from varlen_graphs.capture.driver import copy_to_device

IMAGES = 8
LENGTHS = 4, 33
"""Tokens of the shortest text, and one more than the longest has."""

IN_TURN, WARM = 50, 10
"""Calls of a case before the next has its turn, and how many of them run ahead, not timed."""

BACKENDS: dict[str, Any] = {"cuda": "cuda", "cpu": "tape"}
SIZES = {
    "depth": 27, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip


Call = tuple[torch.Tensor, Any]
"""Rows, and what describes their items."""

Run = Callable[[torch.Tensor, Any], Any]
"""Makes a call."""


def images(calls: int, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, list[Call]]:
    """An encoder of images, and calls with lists of sizes."""
    tower = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**SIZES), dtype=dtype).eval().to(device)
    tower.requires_grad_(False)
    budgets = [vg.budgets.Budget(rows, items=2 * IMAGES, segments=rows // 4) for rows in (128, 256, 384, 512)]
    encoder = vg.recipes.qwen3_vl(tower, budgets, backend=BACKENDS[device]).capture()
    sides = 2 * torch.randint(1, 4, (calls, IMAGES, 2), generator=generator)
    grids = [[(1, h, w) for h, w in sides_of_call] for sides_of_call in sides.tolist()]
    rows = torch.randn(512, tower.patch_embed.proj.weight[0].numel(), device=device, dtype=dtype)
    return encoder, [(rows[: sum(t * h * w for t, h, w in grid)], grid) for grid in grids]


def texts(calls: int, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, list[Call]]:
    """An encoder of padded batches of texts, and calls with masks on the CPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    model = BertModel(BertConfig(**sizes)).eval().requires_grad_(False).to(device, dtype)
    budgets = [vg.budgets.Budget(rows, items=2 * IMAGES) for rows in (128, 192, 256)]
    encoder = vg.recipes.packed_text(model, budgets, backend=BACKENDS[device]).capture()
    made = []
    for lengths in torch.randint(*LENGTHS, (calls, IMAGES), generator=generator):
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        made.append(((torch.randint(1, 512, mask.shape, generator=generator) * mask).to(device), mask))
    return encoder, made


def bare(encoder: Any) -> Run:
    """The calls into CUDA of one replay, everything ready."""
    (graphs,), budget = encoder.executor.store.sets, encoder.budgets[-1]
    graph, arena = graphs[budget], graphs.arena
    block = torch.empty(len(arena.items), dtype=torch.int64, pin_memory=True)
    block.copy_(arena.items)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    copy = arena.items.data_ptr(), block.data_ptr(), block.nbytes, stream.cuda_stream

    def call(rows: torch.Tensor, grid_thw: Any) -> Any:
        copy_to_device(*copy)
        event.record(stream)
        graph.replay()
        return torch._foreach_mul([output[:40] for output in graph.outputs], 1)

    return call


def outputs_alone(graphs: Any, budget: Any) -> Any:
    """A replay that takes no time."""
    return graphs[budget].outputs


def time_calls(run: Run, calls: list[Call], device: str) -> list[float]:
    """Microseconds until each call returns; the device is idle at its begin."""
    times = []
    for rows, items in calls:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(rows, items)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def check(output: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    """Check an output before anything is timed."""
    error = (output - expected).abs().max().item()
    assert error < allowed, f"graphs and eager differ by {error}"  # noqa: S101


def guards(encoder: Any) -> float:
    """Microseconds a call takes to look whether what its graph reads is where it was, and the process the same."""
    guard, pool, number = encoder.executor.store.guard, encoder.pool, 2000

    def look() -> None:
        guard.find_change_sampled()
        pool.check_process()  # at the begin of a call, and at the pool's turn
        pool.check_process()

    return min(timeit.repeat(look, number=number, repeat=5)) / number * 1e6


def shares(run: Run, calls: list[Call], device: str) -> dict[str, float]:
    """The part of the host's time that is spent in each package of this library, in torch, and elsewhere."""
    profile = cProfile.Profile()
    for rows, items in calls:
        if device == "cuda":
            torch.cuda.synchronize()
        profile.enable()
        run(rows, items)
        profile.disable()
    spent: Counter[str] = Counter()
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        parts = Path(file).parts
        if "varlen_graphs" in parts:
            room = Path(*parts[parts.index("varlen_graphs") + 1 :]).parts[0].removesuffix(".py")
        else:
            room = "torch" if "torch" in parts or "torch" in name or "Tensor" in name else "elsewhere"
        spent[room] += own
    return {room: own / spent.total() for room, own in spent.most_common()}


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    encoder, pictures = images(args.calls, device, dtype, generator)
    reader, batches = texts(args.calls, device, dtype, generator)

    def see(rows: torch.Tensor, grid: Any) -> Any:
        return encoder(rows, grid_thw=grid)

    def read(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return reader(input_ids=ids, attention_mask=mask)

    allowed = 0.1 if device == "cuda" else 1e-4
    for rows, grid in pictures[:20]:
        check(see(rows, grid).pooler_output, encoder.eager(rows, grid_thw=grid).pooler_output, allowed)
    for ids, mask in batches[:20]:
        check(read(ids, mask).pooler_output, reader.eager(input_ids=ids, attention_mask=mask).pooler_output, allowed)
    if device == "cpu":
        for rows, grid in pictures:  # the first call of each graph is compared with the module, which a stub fails
            see(rows, grid)
        for ids, mask in batches:
            read(ids, mask)
        for one in (encoder, reader):
            for graphs in one.executor.store.sets:
                graphs.replay = partial(outputs_alone, graphs)

    cases: dict[str, tuple[Run, list[Call]]] = {
        "list": (see, pictures),
        "tensor on the CPU": (see, [(rows, torch.tensor(grid)) for rows, grid in pictures]),
        "padded batch, mask on the CPU": (read, batches),
    }
    if device == "cuda":
        cases["tensor on the GPU"] = see, [(rows, torch.tensor(grid, device=device)) for rows, grid in pictures]
        cases["padded batch, mask on the GPU"] = read, [(ids, mask.to(device)) for ids, mask in batches]
        cases["CUDA alone"] = bare(encoder), pictures
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, replays of nothing"
    result = {"device": name, "torch": torch.__version__, "calls": args.calls, "rows": []}
    print(f"{name}, torch {torch.__version__}, {args.calls} calls")
    print(f"{'layout':30s} {'median':>8s} {'P90':>8s} {'P99':>8s}, us")
    times: dict[str, list[float]] = {case: [] for case in cases}
    for start in range(0, args.calls, IN_TURN):  # a host may be slow for a while
        for case, (run, calls) in cases.items():
            time_calls(run, calls[start : start + WARM], device)
            times[case] += time_calls(run, calls[start : start + IN_TURN], device)
    for case, each in times.items():
        cuts = statistics.quantiles(each, n=100)
        result["rows"].append({"layout": case, "median_us": cuts[49], "p90_us": cuts[89], "p99_us": cuts[98]})
        print(f"{case:30s} {cuts[49]:8.0f} {cuts[89]:8.0f} {cuts[98]:8.0f}")
    result["guards_us"] = guards(encoder)
    print(f"{'of that, guards':30s} {result['guards_us']:8.1f}")
    result["shares"] = {
        case: shares(run, calls, device) for case, (run, calls) in cases.items() if case != "CUDA alone"
    }
    for case, parts in result["shares"].items():
        print(f"{case}: {', '.join(f'{room} {part:.0%}' for room, part in parts.items() if part >= 0.02)}")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
