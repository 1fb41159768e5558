"""The demo: eager and graphed runs of each call, compared in one table."""

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varlen_graphs as vg
from varlen_graphs.attention.transformers import use_attention
from varlen_graphs.demo.inputs import Sample, load_samples, make_samples, save_samples

EXACT = 1e-5
"""Maximum relative L2 in float32."""

ROUNDING = 1.1
"""Maximum mean distance of graphed bfloat16 runs to float32, as a multiple of that of eager runs."""

BFLOAT16 = 3e-2
"""Maximum relative L2 to float32 of each bfloat16 call."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    call: str
    rows: int
    budget: int  # rows of the replayed budgets
    padding: float  # share of padding in these, 0 to 1
    eager_ms: float  # median wall time of the tower itself
    graphed_ms: float  # median wall time of the encoder
    error: float  # relative L2 of the encoder's outputs to the tower's, maximum over outputs
    eager_to_float32: float | None  # of the tower, with the encoder's attention, to its float32 copy; None in float32
    graphed_to_float32: float | None


def run_demo(
    device: str | None, inputs: Path | None, save_inputs: Path | None, report: Path | None, picture: Path | None
) -> int:
    """Run the demo, print the table and the verdict, and return 0 if all calls agree, else 1.

    `inputs` is a file of preprocessed samples to use instead of the processors, `report` one to write the table to, and
    `picture` one for a picture: of times on a GPU, of errors on a CPU.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    samples, origin = (load_samples(inputs), str(inputs)) if inputs else make_samples(large=on_gpu)
    if not samples:
        print(f"{inputs} holds no samples: expected a file written by --save-inputs")
        return 1
    if save_inputs:
        save_samples(samples, save_inputs)
    tower = make_tower(where)
    encoder = vg.recipes.qwen3_vl(
        tower, vg.Ladder(256, 8192) if on_gpu else vg.Ladder(256, 2560, step=1.25), backend="cuda" if on_gpu else "tape"
    )
    started = time.perf_counter()
    encoder.capture()
    seconds = time.perf_counter() - started
    parameters = sum(p.numel() for p in tower.parameters()) / 1e6
    dtype, graphs = next(tower.parameters()).dtype, "CUDA graphs" if on_gpu else "tapes"
    print(f"tower: {type(tower).__name__}, {parameters:.1f}M parameters, {dtype}, random weights")
    print(f"inputs: {origin}")
    print(f"captured {len(encoder.budgets)} {graphs} in {seconds:.1f} s on {_name(where)}")
    if not on_gpu:
        print("on the CPU, the tape computes what CUDA graphs compute, but its times say nothing about a GPU")
    print()

    rows = [_measure(tower, encoder, sample, where) for sample in samples]
    _print_table(rows)
    agree = _agree(rows) and all(row.budget >= row.rows for row in rows)
    print(f"\n{'all calls agree' if agree else 'NOT all calls agree'} with eager: {_criterion(rows)}")
    if encoder.stats.eager:
        print(f"eager calls: {dict(encoder.stats.eager)}")
    if report:
        facts = {
            "device": _name(where), "torch": torch.__version__, "python": platform.python_version(), "inputs": origin,
            "capture_s": seconds, "agree": agree, "calls": [asdict(row) for row in rows],
        }  # fmt: skip
        report.write_text(json.dumps(facts, indent=1) + "\n")
    if picture:
        _draw(picture, rows, where)
        print(f"drawn in {picture}")
    return 0 if agree else 1


def make_tower(device: torch.device) -> nn.Module:
    """Return a Qwen3-VL tower with random weights: of the 8B model in bfloat16 on a GPU, else a tiny one in float32."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    if device.type == "cuda":
        sizes = {"out_hidden_size": 4096}
        dtype = torch.bfloat16
    else:
        sizes = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96}
        sizes |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2]}  # type: ignore[dict-item]
        dtype = torch.float32
    torch.manual_seed(0)
    tower: nn.Module = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**sizes), dtype=dtype).to(device)
    return tower.eval().requires_grad_(False)


def _measure(tower: nn.Module, encoder: vg.GraphedEncoder, sample: Sample, device: torch.device) -> Row:
    pixels, grid = sample.pixel_values.to(device), sample.grid_thw.to(device)

    def eager() -> Any:
        with torch.no_grad():
            return tower(pixels.to(next(tower.parameters()).dtype), grid_thw=grid)

    def graphed() -> Any:
        return encoder(pixels, grid_thw=grid)

    before = encoder.stats.rows, encoder.stats.padding
    expected, got = eager(), graphed()
    rows, padding = encoder.stats.rows - before[0], encoder.stats.padding - before[1]
    to_float32: tuple[float | None, float | None] = None, None
    if next(tower.parameters()).dtype != torch.float32:
        with torch.no_grad():
            exact = copy.deepcopy(tower).float()(pixels.float(), grid_thw=grid)
        with use_attention(tower):  # two attentions round differently; compare the rest
            to_float32 = _distance(eager(), exact), _distance(got, exact)
    repeats = 10 if device.type == "cuda" else 3
    return Row(
        sample.name, pixels.shape[0], rows + padding, padding / max(1, rows + padding), _time(eager, device, repeats),
        _time(graphed, device, repeats), _distance(got, expected), *to_float32,
    )  # fmt: skip


def _distance(got: Any, expected: Any) -> float:
    """Return the maximum relative L2 over outputs; infinite if an output is not finite."""
    worst = 0.0
    for a, b in zip(_tensors(got), _tensors(expected), strict=True):
        distance = ((a.float() - b.float()).norm() / b.float().norm()).item()
        worst = max(worst, distance) if distance == distance else float("inf")
    return worst


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if hasattr(output, "values") else output
    return [tensor for part in parts for tensor in _tensors(part)]


def _time(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median wall time of a call in ms, synchronized before and after."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _agree(rows: list[Row]) -> bool:
    if any(row.graphed_to_float32 is None for row in rows):
        return all(row.error <= EXACT for row in rows)
    eager = statistics.mean(row.eager_to_float32 or 0.0 for row in rows)
    graphed = statistics.mean(row.graphed_to_float32 or 0.0 for row in rows)
    return graphed <= ROUNDING * eager and all((row.graphed_to_float32 or 0.0) <= BFLOAT16 for row in rows)


def _criterion(rows: list[Row]) -> str:
    if rows[0].graphed_to_float32 is None:
        return f"relative L2 at most {max(row.error for row in rows):.1e} (allowed {EXACT:.0e})"
    eager = statistics.mean(row.eager_to_float32 or 0.0 for row in rows)
    graphed = statistics.mean(row.graphed_to_float32 or 0.0 for row in rows)
    return (
        f"mean relative L2 to the float32 tower is {graphed:.2e} graphed, {eager:.2e} eager (allowed {ROUNDING} x "
        f"eager, and {BFLOAT16:.0e} a call)"
    )


def _draw(path: Path, rows: list[Row], device: torch.device) -> None:
    """Draw what a user gets: the speed-up on a GPU, the agreement on a CPU."""
    from varlen_graphs.demo.figure import draw_errors, draw_times

    if device.type == "cuda":
        times = {row.call: (row.eager_ms, row.graphed_ms) for row in rows}
        draw_times(path, f"Vision tower of Qwen3-VL-8B, {_name(device)}", times)
    else:
        draw_errors(path, "A tiny Qwen3-VL tower, replayed on the CPU", {row.call: row.error for row in rows}, EXACT)


def _print_table(rows: list[Row]) -> None:
    print(f"{'call':<26}{'rows':>7}{'budget':>8}{'padding':>9}{'eager ms':>10}{'graphed ms':>12}{'error':>10}")
    for row in rows:
        print(
            f"{row.call:<26}{row.rows:>7}{row.budget:>8}{row.padding:>9.1%}{row.eager_ms:>10.2f}{row.graphed_ms:>12.2f}"
            f"{row.error:>10.1e}"
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
