"""Wall milliseconds of a Qwen3-VL tower: eager against graphed, over the sizes people send.

Run with `make bench`. Correctness comes first: nothing is timed unless every call agrees. Every figure is the median of
repeated calls with a synchronize on each side, inputs on the GPU, outputs the caller's own.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import __version__ as transformers_version
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import varlen_graphs as vg
from varlen_graphs.integrations.transformers import use_attention

PATCH = 16

SIZES = {
    "2b": {"depth": 24, "hidden_size": 1024, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]},
    "8b": {"out_hidden_size": 4096},
}
"""Towers by the size of the model they belong to; the 2B tower has an MLP of 4096."""
SIZES["2b"]["intermediate_size"] = 4096


def image(side: int) -> tuple[int, int, int]:
    """A square image, in patches."""
    return 1, side // PATCH, side // PATCH


CALLS = {
    "224x224": [image(224)],
    "448x448": [image(448)],
    "672x672": [image(672)],
    "896x896": [image(896)],
    "1344x1344": [image(1344)],
    "4 of 448x448": [image(448)] * 4,
    "video, 4 x 224x224": [(4, 14, 14)],
}


def make_tower(size: str, dtype: torch.dtype) -> Any:
    """A tower of the 2B or 8B model with random weights, on the GPU."""
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(**SIZES[size])
    return Qwen3VLVisionModel._from_config(config, dtype=dtype).cuda().eval()


def measure(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median wall milliseconds of a call, and of the host until it returns."""
    walls, hosts = [], []
    for _ in range(3):
        run()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        hosts.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) * 1e3)
    return statistics.median(walls), statistics.median(hosts)


def distance(got: Any, expected: Any) -> float:
    """Relative L2, the worst of all outputs."""

    def tensors(output: Any) -> list[Tensor]:
        parts = [output.last_hidden_state, output.pooler_output, *output.deepstack_features]
        return [part.double() for part in parts]

    pairs = zip(tensors(got), tensors(expected), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def capture_costs(tower: Any) -> tuple[vg.GraphedEncoder, dict[str, float]]:
    """Capture the default ladder; seconds, and GiB of memory it takes beside the weights."""
    gc.collect()
    torch.cuda.empty_cache()
    before, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    encoder = vg.recipes.qwen3_vl(tower).capture()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    return encoder, {
        "budgets": len(encoder.budgets),
        "largest_rows": encoder.budgets[-1].rows,
        "seconds": seconds,
        "gib": (before - torch.cuda.mem_get_info()[0]) / 2**30,
    }


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    dtype = torch.bfloat16
    tower, exact = make_tower(options.size, dtype), make_tower(options.size, torch.float32)
    exact.load_state_dict(tower.state_dict())
    encoder, capture = capture_costs(tower)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers_version}, {dtype}\n"
        f"{options.size} tower, {capture['budgets']} graphs up to {capture['largest_rows']} rows: "
        f"{capture['seconds']:.2f} s, {capture['gib']:.2f} GiB\n"
    )
    header = ("call", "rows", "budget", "padding", "sdpa", "varlen", "graphed", "host", "eager err", "graphed err")
    print("{:<20}{:>7}{:>8}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}{:>12}".format(*header))
    results = []
    for name, grid in CALLS.items():
        grid_thw = torch.tensor(grid)
        rows = torch.randn(int(grid_thw.prod(-1).sum()), 1536, device="cuda").to(dtype)
        on_gpu = grid_thw.cuda()

        def eager(rows: Tensor = rows, grid: Tensor = on_gpu) -> Any:
            with torch.no_grad():
                return tower(rows, grid_thw=grid)

        def graphed(rows: Tensor = rows, grid: Tensor = grid_thw) -> Any:
            return encoder(rows, grid_thw=grid)

        with torch.no_grad():
            expected = exact(rows.float(), grid_thw=on_gpu)
        with use_attention(tower):
            eager_error = distance(eager(), expected)
        before = encoder.stats.rows + encoder.stats.padding
        graphed_error = distance(graphed(), expected)
        budget = encoder.stats.rows + encoder.stats.padding - before
        if not graphed_error <= max(1.5 * eager_error, 1e-3) or not graphed_error <= 3e-2:
            raise SystemExit(f"{name}: graphed error {graphed_error:.2e}, eager {eager_error:.2e}: not timed")
        sdpa, _ = measure(eager, options.repeats)
        with use_attention(tower):
            varlen, _ = measure(eager, options.repeats)
        wall, host = measure(graphed, options.repeats)
        result = {
            "call": name, "rows": rows.shape[0], "budget": budget, "padding": 1 - rows.shape[0] / budget,
            "eager_sdpa_ms": sdpa, "eager_varlen_ms": varlen, "graphed_ms": wall, "graphed_host_ms": host,
            "eager_error": eager_error, "graphed_error": graphed_error,
        }  # fmt: skip
        results.append(result)
        print(
            f"{name:<20}{rows.shape[0]:>7}{budget:>8}{result['padding']:>9.1%}{sdpa:>9.2f}{varlen:>9.2f}{wall:>9.2f}"
            f"{host:>9.3f}{eager_error:>11.2e}{graphed_error:>12.2e}"
        )
    if options.json:
        facts = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers_version,
            "python": platform.python_version(), "tower": options.size, "dtype": str(dtype), "capture": capture,
            "repeats": options.repeats, "calls": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
