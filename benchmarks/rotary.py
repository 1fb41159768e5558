"""Rotary application on packed projections, microseconds and GB/s inside a captured graph.

Run with `make bench-kernels`. Input: `qkv [rows, 3, heads, head_dim]` in bfloat16, `cos` and `sin` float32 `[rows,
head_dim]`. Out come the rotated queries and keys. Nothing is timed unless it agrees with a float32 reference.

- *torch*: the reference, a dozen plain operations.
- *compiled*: the reference under torch.compile, for this very shape.
- *ours*: the fused kernel.

GB/s counts what has to move: q and k in and out once, cos and sin in once.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks.common import distance, facts, failures, headline, table, time_kernels, write_json
from varlen_graphs.kernels.rotary.reference import apply_rotary

HEADS = 16
HEAD_DIMS = (72, 64, 128)
ROWS = (196, 784, 3136, 7056, 16384)

Rotate = Callable[[], tuple[Tensor, Tensor]]


def ours(qkv: Tensor, cos: Tensor, sin: Tensor) -> Rotate:
    """Our kernel. The only place that calls it."""
    return lambda: vg.kernels.apply_rotary(qkv[:, 0], qkv[:, 1], cos, sin)


def plain(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, on q and k."""
    return apply_rotary(qkv[:, 0], qkv[:, 1], cos, sin)


def compiled(qkv: Tensor, cos: Tensor, sin: Tensor) -> Rotate:
    """The reference, fused by the compiler for this shape."""
    torch.compiler.reset()
    fused = torch.compile(plain, dynamic=False)
    return lambda: fused(qkv, cos, sin)


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    about = facts()
    print(f"{headline(about)}, bfloat16, {HEADS} heads\n")
    result: dict[str, Any] = {**about, "dtype": "bfloat16", "heads": HEADS, "rows": []}
    for head_dim in options.head_dims:
        for rows in options.rows:
            result["rows"].append(time_row(head_dim, rows))
            write_json(options.json, result)
    print(report(result["rows"]))


@torch.no_grad()
def time_row(head_dim: int, rows: int) -> dict[str, Any]:
    """Microseconds of every system at one size; a system that fails says why."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, 3, HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(rows, head_dim // 2, device="cuda") * 100
    cos, sin = (torch.cat([part, part], dim=1) for part in (angles.cos(), angles.sin()))
    expected = plain(qkv.float(), cos, sin)
    plain_error = distance(plain(qkv, cos, sin), expected)

    systems: dict[str, Callable[[], Rotate]] = {
        "torch": lambda: lambda: plain(qkv, cos, sin),
        "compiled": lambda: compiled(qkv, cos, sin),
        "ours": lambda: ours(qkv, cos, sin),
    }
    bytes_moved = 4 * rows * HEADS * head_dim * 2 + 2 * rows * head_dim * 4
    row: dict[str, Any] = {"head_dim": head_dim, "rows": rows, "bytes": bytes_moved, "torch_error": plain_error}
    return row | time_kernels(systems, expected, plain_error)


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    header = ("head dim", "rows", "torch", "compiled", "ours", "GB/s ours", "compiled / ours")
    lines = []
    for row in rows:
        torch_us, compiled_us, ours_us = (row.get(f"{system}_us") for system in ("torch", "compiled", "ours"))
        rate = row["bytes"] / (ours_us * 1e-6) / 1e9 if ours_us else None
        ratio = compiled_us / ours_us if compiled_us and ours_us else None
        lines.append((row["head_dim"], row["rows"], torch_us, compiled_us, ours_us, rate, ratio))
    return "\n".join([table(header, lines), *failures(rows)])


if __name__ == "__main__":
    main()
