"""Which row counts matrix products like: GPU nanoseconds a row of a layer's products, by rows modulo 128.

The products of one layer of five encoders, biases and GELU included as torch runs them, inside a captured graph with
weights of several layers, averaged over some neighbouring tiles. It is why a ladder takes the row counts it takes.
Nothing is timed unless one product agrees with float32.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import check, distance, facts, gpu_microseconds, headline, table, write_json

Shapes = list[tuple[int, int, bool]]
"""Columns in, columns out, and whether a GELU follows."""

ENCODERS: dict[str, Shapes] = {
    "Qwen3-VL 8B": [(1152, 3456, False), (1152, 1152, False), (1152, 4304, True), (4304, 1152, False)],
    "Qwen3-VL 2B": [(1024, 3072, False), (1024, 1024, False), (1024, 4096, True), (4096, 1024, False)],
    "GLM-4.1V": [(1536, 4608, False), (1536, 1536, False), (1536, 8192, False), (4096, 1536, False)],
    "Qwen2.5-VL": [(1280, 3840, False), (1280, 1280, False), (1280, 6840, False), (3420, 1280, False)],
    "BERT base": [(768, 2304, False), (768, 768, False), (768, 3072, True), (3072, 768, False)],
}
TILE = 128
RESIDUES = range(0, TILE, 16)
STARTS = (512, 1024, 2048, 3072, 6144, 12_288, 15_872)
TILES, LAYERS = 3, 4


def product(rows: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
    """One product as torch runs it for a linear layer: `[rows, out]`."""
    if gelu:
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return torch.addmm(bias, rows, weight.t())


def layers(weights: list[Tensor], rows: Tensor, bias: Tensor, gelu: bool) -> Callable[[], list[Tensor]]:
    """The same product of several layers, so that no weight stays in the cache."""
    return lambda: [product(rows, weight, bias, gelu) for weight in weights]


def time_encoder(shapes: Shapes, rows: Tensor) -> list[dict[str, Any]]:
    """Nanoseconds a row by start and residue; `rows` bfloat16 `[most rows, most columns]`."""
    made = []
    for columns, out, gelu in shapes:
        weights = [torch.randn(out, columns, device="cuda", dtype=rows.dtype) * columns**-0.5 for _ in range(LAYERS)]
        made.append((weights, torch.randn(out, device="cuda", dtype=rows.dtype), gelu, columns))
    weights, bias, gelu, columns = made[0]
    some = rows[:1000, :columns].contiguous()
    expected = torch.addmm(bias.float(), some.float(), weights[0].float().t())
    check(distance([product(some, weights[0], bias, gelu)], [expected]), 1e-2)
    results = []
    for start in STARTS:
        for residue in RESIDUES:
            spent = total = 0.0
            for count in range(start + residue, start + residue + TILES * TILE, TILE):
                total += count
                for weights, bias, gelu, columns in made:
                    run = layers(weights, rows[:count, :columns].contiguous(), bias, gelu)
                    spent += gpu_microseconds(run, replays=3, launches=3) / LAYERS
            results.append({"rows": start, "residue": residue, "ns_per_row": spent / total * 1e3})
    return results


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "rows": []}
    print(headline(result) + "\n")
    most = max(STARTS) + TILES * TILE + TILE
    rows = torch.randn(most, max(columns for shapes in ENCODERS.values() for columns, *_ in shapes), device="cuda")
    for name, shapes in ENCODERS.items():
        result["rows"] += [{"encoder": name, **row} for row in time_encoder(shapes, rows.bfloat16())]
        write_json(options.json, result)
    lines = [
        (name, start, *(row["ns_per_row"] for row in result["rows"] if (row["encoder"], row["rows"]) == (name, start)))
        for name in ENCODERS
        for start in STARTS
    ]
    print(table(("encoder", "rows from", *(f"128 k + {residue}" for residue in RESIDUES)), lines))


if __name__ == "__main__":
    main()
