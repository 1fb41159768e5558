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


def timed_capture(tower: Any, prove: bool) -> dict[str, float]:
    """Seconds of a capture, and of its parts."""
    encoder = vg.recipes.qwen3_vl(tower, verify=vg.Verify(prove=prove))
    torch.cuda.synchronize()
    start = time.perf_counter()
    encoder.capture()
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    seconds = {"total": total, **encoder.executor.store.capturer.seconds}
    assert not encoder.executor.store.sets[0].refused, "the proof has failed"  # noqa: S101
    encoder.release()
    return seconds


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
        medians = {
            "with": {part: statistics.median(run[part] for run in runs[True]) for part in runs[True][0]},
            "without": {part: statistics.median(run[part] for run in runs[False]) for part in runs[False][0]},
        }
        more = medians["with"]["total"] / medians["without"]["total"] - 1
        result |= {"seconds": medians, "runs": {str(prove): own for prove, own in runs.items()}, "more": more}
        write_json(args.json, result)
    parts = list(medians["with"])
    print(headline(result))
    print(table(["seconds", *parts], [[name, *map(own.get, parts)] for name, own in medians.items()]))
    print(f"the proof makes a capture take {more:.1%} more")


if __name__ == "__main__":
    main()
