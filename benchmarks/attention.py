"""Varlen attention, microseconds a layer inside a captured graph: ours against FlashAttention 2 to 4 and cuDNN.

Run with `make bench-kernels`. 16 heads; q, k and v are views of one packed projection, as in a tower. Nothing is timed
unless it agrees with a float32 reference.

- *FA2 exact*: `torch.nn.attention.varlen.varlen_attn` with exactly the segments and the longest length of the row.
- *FA2 padded*: the same with 64 segment slots and `max_seqlen` 8192, as a graph of many layouts must freeze it.
- *FA3 padded*: `flash_attn_varlen_func` of `fa3-fwd`, where it is installed, with 256 segment slots.
- *FA4 exact*, *FA4 padded*: `flash_attn.cute` of `flash-attn-4`, where it is installed, with exactly the segments and
  the longest length of the row, and with 256 segment slots.
- *cuDNN*: dense `scaled_dot_product_attention` at the exact shape, where there is one segment.
- *ours*: with exactly the segments there are, with 64 slots, and with 256, `max_seqlen` 8192 in the last two; the
  backend that was timed to be the faster one, as in captures.
- *triton*: that backend alone, with 256 slots.
- *schedule*: the tile schedule with 256 slots, which is computed once and serves every layer.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import varlen_graphs as vg
from benchmarks.common import (
    distance,
    facts,
    failures,
    gpu_microseconds,
    headline,
    table,
    time_kernels,
    write_json,
)
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.attention.kernel import reference
from varlen_graphs.attention.timing import measuring

HEADS = 16
LARGEST = 8192
"""The `max_seqlen` of padded calls, unless a segment is longer."""

ROWS: dict[str, tuple[int, list[int]]] = {
    "72, 196": (72, [196]),
    "72, 784": (72, [784]),
    "72, 1764": (72, [1764]),
    "72, 3136": (72, [3136]),
    "72, 7056": (72, [7056]),
    "72, 4 x 784": (72, [784] * 4),
    "72, 32 x 196": (72, [196] * 32),
    "72, 49 x 64": (72, [64] * 49),
    "72, 9 x 196": (72, [196] * 9),
    "72, 27 x 64": (72, [64] * 27),
    "72, 16384": (72, [16384]),
    "72, 16 x 1024": (72, [1024] * 16),
    "72, 8 x 1764": (72, [1764] * 8),
    "80, 7056": (80, [7056]),
    "64, 3136": (64, [3136]),
    "64, 7056": (64, [7056]),
    "128, 3136": (128, [3136]),
    "128, 7056": (128, [7056]),
    "128, 16384": (128, [16384]),
    "128, 16 x 1024": (128, [1024] * 16),
    "96, 7056": (96, [7056]),
}
"""Head dim and segment lengths, by name."""

Attend = Callable[[], Tensor]


def ours_with_schedule(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: AttentionBackend = "auto"
) -> tuple[Attend, Any]:
    """Our kernel: what one layer runs, and what is computed once for all layers. The only place that calls it."""

    def tiles() -> Any:
        return vg.attention.tile_schedule(
            cu_seqlens, max_seqlen, rows=q.shape[0], heads=q.shape[1], head_dim=q.shape[2]
        )

    schedule = tiles()

    def attend() -> Tensor:
        return vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen, backend=backend, schedule=schedule)

    with measuring():
        attend()
    return attend, tiles


def ours(*arguments: Any) -> Attend:
    """Our kernel, the tile schedule already there."""
    return ours_with_schedule(*arguments)[0]


def flash2(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """FlashAttention 2, as torch ships it."""
    return lambda: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


def flash3(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """FlashAttention 3, as the wheel `fa3-fwd` ships it."""
    from fa3_fwd_interface import flash_attn_varlen_func

    def attend() -> Tensor:
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return out[0] if isinstance(out, tuple) else out

    return attend


def flash4(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """FlashAttention 4, as the wheel `flash-attn-4` ships it."""
    from flash_attn.cute import flash_attn_varlen_func

    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    longest = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}

    def attend() -> Tensor:
        out = flash_attn_varlen_func(q, k, v, **lengths, **longest)
        return out[0] if isinstance(out, tuple) else out

    return attend


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Attend:
    """The dense attention of cuDNN over all rows; refuses where torch has none for these inputs."""
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]  # [1, heads, rows, head_dim]

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*dense)[0].transpose(0, 1)

    return attend


def slots(lengths: list[int], count: int) -> Tensor:
    """`cu_seqlens` with so many segment slots, the tail repeating the last value: int32 `[count + 1]` on the GPU."""
    ends = list(accumulate(lengths))
    return torch.tensor([0, *ends, *[ends[-1]] * (count - len(ends))], dtype=torch.int32, device="cuda")


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"rows: {'; '.join(ROWS)}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    about = facts()
    print(f"{headline(about)}, {options.dtype}, {HEADS} heads\n")
    result: dict[str, Any] = {**about, "dtype": options.dtype, "heads": HEADS, "rows": []}
    for name in options.only or ROWS:
        row = time_row(name, getattr(torch, options.dtype))
        result["rows"].append(row)
        write_json(options.json, result)
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    print(f"\n{report(result['rows'])}")


@torch.no_grad()
def time_row(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of every system for one head dim and one set of lengths; a system that fails says why."""
    head_dim, lengths = ROWS[name]
    total, exact_slots, longest = sum(lengths), len(lengths), max(LARGEST, *lengths)
    torch.manual_seed(0)
    qkv = torch.randn(total, 3, HEADS, head_dim, device="cuda", dtype=dtype)
    q, k, v = qkv.unbind(1)
    exact, padded, roomy = (slots(lengths, count) for count in (exact_slots, max(64, exact_slots), 256))
    expected = reference.by_segment(q.float(), k.float(), v.float(), exact, exact, head_dim**-0.5, -1, -1)
    flash2_error = distance([flash2(q, k, v, exact, max(lengths))()], [expected])

    systems: dict[str, Callable[[], Attend]] = {
        "fa2_exact": lambda: flash2(q, k, v, exact, max(lengths)),
        "fa2_padded": lambda: flash2(q, k, v, padded, longest),
        "ours_exact": lambda: ours(q, k, v, exact, max(lengths)),
        "ours_64": lambda: ours(q, k, v, padded, longest),
        "ours_256": lambda: ours(q, k, v, roomy, longest),
        "triton_256": lambda: ours(q, k, v, roomy, longest, "triton"),
    }
    if dtype == torch.bfloat16 and find_spec("fa3_fwd_interface"):
        systems["fa3_256"] = lambda: flash3(q, k, v, roomy, longest)
    if dtype == torch.bfloat16 and find_spec("flash_attn") and find_spec("flash_attn.cute"):
        systems["fa4_exact"] = lambda: flash4(q, k, v, exact, max(lengths))
        systems["fa4_256"] = lambda: flash4(q, k, v, roomy, longest)
    if exact_slots == 1:
        systems["cudnn"] = lambda: cudnn(q, k, v)
    row: dict[str, Any] = {"row": name, "head_dim": head_dim, "lengths": lengths, "fa2_error": flash2_error}
    row |= time_kernels(systems, [expected], flash2_error)
    if "ours_256_us" in row:
        row["schedule_us"] = gpu_microseconds(ours_with_schedule(q, k, v, roomy, longest)[1])
    row["tflop"] = 4 * sum(length**2 for length in lengths) * HEADS * head_dim / 1e12
    return row


def report(rows: list[dict[str, Any]]) -> str:
    """The table. Ratios are the other's time over ours, so above 1 is faster."""
    header = (
        "head dim, lengths", "FA2 exact", "FA2 padded", "FA3 padded", "FA4 exact", "FA4 padded", "cuDNN", "ours exact",
        "ours 64", "ours 256", "triton", "schedule", "TFLOP/s", "FA2 exact / ours", "FA3 / ours", "cuDNN / ours",
        "256 / exact slots",
    )  # fmt: skip
    lines = []
    for row in rows:
        fa2, fa3, dense, best, ours64, ours256 = (
            row.get(f"{system}_us") for system in ("fa2_exact", "fa3_256", "cudnn", "ours_exact", "ours_64", "ours_256")
        )
        rate = row["tflop"] / (ours64 * 1e-6) if ours64 else None
        lines.append(
            (
                row["row"], fa2, row.get("fa2_padded_us"), fa3, row.get("fa4_exact_us"), row.get("fa4_256_us"), dense,
                best, ours64, ours256, row.get("triton_256_us"), row.get("schedule_us"), rate, _ratio(fa2, ours64),
                _ratio(fa3, ours256), _ratio(dense, ours64), _ratio(ours256, best),
            )
        )  # fmt: skip
    return "\n".join([table(header, lines), *failures(rows)])


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


if __name__ == "__main__":
    main()
