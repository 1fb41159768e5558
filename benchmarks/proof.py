"""The price of the proof: captures of the default ladder for the tower of Qwen3-VL, with and without it, in turn."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import varlen_graphs as vg
from benchmarks.common import facts, headline, table, write_json
from benchmarks.systems import make_tower

NAMES = {True: "with the proof", False: "without"}
PARTS = {"captured": "captured_s", "verified": "proven_s", "timed": "timed_s"}
"""Names of the parts of a capture, and here."""


def timed_capture(tower: Any, prove: bool) -> dict[str, float]:
    """Seconds of a capture, and of its parts."""
    encoder = vg.recipes.qwen3_vl(tower, verify=vg.options.Verify(at_capture=prove))
    torch.cuda.synchronize()
    start = time.perf_counter()
    encoder.capture()
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    seconds = {PARTS[part]: took for part, took in encoder.executor.store.seconds.items()}
    assert not encoder.executor.store.sets[0].rejected, "the proof has failed"  # noqa: S101
    encoder.release()
    return {"total_s": total, **seconds}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["2b", "8b"], default="8b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tower = make_tower(args.size, torch.bfloat16)
    timed_capture(tower, True)  # compiles kernels
    runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    result: dict[str, Any] = {**facts(), "size": args.size}
    for _ in range(args.repeats):
        for prove, own in runs.items():
            own.append(timed_capture(tower, prove))
        rows = [{"capture": NAMES[prove], **medians(own)} for prove, own in runs.items()]
        result |= {"rows": rows, "runs": {NAMES[prove]: own for prove, own in runs.items()}}
        write_json(args.json, result)
    print(headline(result))
    print(table(list(rows[0]), [[row.get(part) for part in rows[0]] for row in rows]))
    print(f"the proof makes a capture take {rows[0]['total_s'] / rows[1]['total_s'] - 1:.1%} more")


if __name__ == "__main__":
    main()
